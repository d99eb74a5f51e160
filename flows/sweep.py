from prefect import flow


@flow(name="sweep")
def sweep(grid: str = "ablation", models: str | list[str] = "smollm2-135m", mechanisms: str = "gdn", budgets: str = "56+8") -> str:
    return grid
