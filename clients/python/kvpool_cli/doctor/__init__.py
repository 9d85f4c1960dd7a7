"""`kvpool doctor`: what commonly goes wrong, looked for before it does, each finding with its remediation."""
