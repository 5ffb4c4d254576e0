"""`python -m powerinfer` is the command `powerinfer`."""

from powerinfer.cli.main import entry

if __name__ == "__main__":
    entry()
