"""`python -m co2.simulate`: the simulator, which stands beside the library."""

from runpy import run_module

if __name__ == "__main__":
    run_module("co2_measure.simulate", run_name="__main__", alter_sys=True)
