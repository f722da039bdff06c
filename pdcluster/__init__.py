"""Launch and keep separate prefill and decode pools of vLLM: spec, plan, backends, supervisor."""
