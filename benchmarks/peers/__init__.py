"""Other tools on the incidents of the benchmark of verdicts: one file per tool, each with NAME, NEEDS and `ask`."""
