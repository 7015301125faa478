"""Offline tools: traces, replay, planning, quality and a simulated cluster. The service imports none of them."""
