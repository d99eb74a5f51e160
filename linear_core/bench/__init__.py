"""Measurements that stand behind the documents: agreement of the forms, speed and memory against full attention."""
