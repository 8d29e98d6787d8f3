"""Static checks."""


def check_hazards(program, entry, collector) -> None:
    return None
