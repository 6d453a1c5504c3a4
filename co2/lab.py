"""`python -m co2.lab`: the laboratory, which stands beside the library."""

from runpy import run_module

if __name__ == "__main__":
    run_module("co2_measure.lab", run_name="__main__", alter_sys=True)
