-- one database each; golinear, the store of claims and results, is made by POSTGRES_USER's name
CREATE DATABASE prefect;
CREATE DATABASE mlflow;
