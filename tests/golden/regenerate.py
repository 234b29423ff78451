"""Write the golden answers anew and say what changed.

python tests/golden/regenerate.py [--only WORD ...] [--check] [--exact] [--reverse]

--only takes cases whose "group: name" has one of the words; --check writes nothing and ends with 1 where anything differs;
--exact also tells of numbers that differ by rounding alone; --reverse runs the cases from the last to the first (an answer must not
depend on what ran before it).
"""

from __future__ import annotations

import argparse
import json
import sys

from golden_cases import FOLDER, RELATIVE_TOLERANCE, cases, cpu_seconds, differences, stored_answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--reverse", action="store_true")
    options = parser.parse_args()
    stored, everything = stored_answers(), cases()
    chosen = [case for case in everything if not options.only or any(word in case.label for word in options.only)]
    total_s, changed, rel_tol = 0.0, 0, 0.0 if options.exact else RELATIVE_TOLERANCE
    for case in chosen[::-1] if options.reverse else chosen:
        actual, seconds = cpu_seconds(case)
        total_s += seconds
        expected = stored.get(case.group, {}).get(case.name)
        changes = ["new"] if expected is None else list(differences(expected, actual, rel_tol=rel_tol))
        changed += bool(changes)
        print(f"{seconds:6.2f} s  {case.label}" + (f"  exit {actual['exit_code']}" if actual["exit_code"] else ""))
        for line in changes:
            print(f"          {line}")
        if changes and not options.check:
            stored.setdefault(case.group, {})[case.name] = actual
    print(f"{len(chosen)} cases, {total_s:.1f} CPU s, {changed} changed")
    if options.check:
        return int(changed > 0)
    for group in {case.group for case in everything} | stored.keys():
        names = [case.name for case in everything if case.group == group]
        answers = {name: stored[group][name] for name in names if name in stored.get(group, {})}
        path = FOLDER / "answers" / f"{group}.json"
        if answers:
            path.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
        else:
            path.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
