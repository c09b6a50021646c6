"""Everything around training: inspecting data, planning and benchmarking jobs, comparing runs."""
