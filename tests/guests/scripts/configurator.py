# Read with exec: "--key=value" overrides a global of the script.
import sys
from ast import literal_eval

for arg in sys.argv[1:]:
    if "=" in arg:
        key, value = arg.removeprefix("--").split("=", 1)
        if key not in globals():
            raise ValueError(f"unknown setting: {key}")
        try:
            globals()[key] = literal_eval(value)
        except (SyntaxError, ValueError):
            globals()[key] = value
