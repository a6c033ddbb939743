"""Placement policies: ours (`watchword`) and the ones of other routers, rebuilt to compare against."""
