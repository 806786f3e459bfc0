"""Run an operation's small cases through Triton's interpreter on the CPU; started by test_interpreter.py.

    python run_small_cases.py set_difference [operation names to leave out]

TRITON_INTERPRET has to be set before any kernel module is imported, hence a process of its own.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from nosa_sys.kernels.registry import load_operation


def main(module: str, left_out: list[str]) -> int:
    torch.set_num_threads(1)
    failures = 0
    n_cases = 0
    for operation in load_operation(module):
        if operation.name in left_out:
            continue
        for seed, case in enumerate(case for case in operation.cases() if "small" in case.uses):
            generator = torch.Generator()
            generator.manual_seed(seed)
            inputs = operation.make_inputs(case, torch.device("cpu"), generator)
            fast = operation.fast(inputs)
            errors = operation.compare(case, inputs, fast, operation.reference(inputs))
            n_cases += 1
            if not errors or not all(error <= limit for error, limit in errors.values()):
                failures += 1
                print(f"FAIL {operation.name} {case.name} {case.dtype}: {errors}")
    print(f"{n_cases} cases, {failures} failed")
    return 1 if failures or not n_cases else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
