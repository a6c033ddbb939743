"""The simulator against cases worked out by hand, and its loaders, generators and command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from cluster.api.ids import WorkerId
from router.config import AdmissionConfig
from router.policies.catalog import POLICIES, make_policy
from router.policies.scored import OraclePolicy
from router.policies.watchword import WatchwordPolicy
from router.policy import Policy
from router.simulate.cli import app
from router.simulate.config import EngineKind, SimulationConfig
from router.simulate.fairness import compare_tenants
from router.simulate.generators import GENERATORS, GeneratorConfig, multi_turn, prefix_repetition, tenants
from router.simulate.loaders import load_trace
from router.simulate.lru_cache import LruCache
from router.simulate.owner_index import OwnerIndex
from router.simulate.run import policy_names, run_simulation, to_json
from router.simulate.shared_engine import SharedEngines
from router.simulate.simulation import Simulation
from router.simulate.step_cost import StepCost, StepSample, fit_step_cost
from router.simulate.trace import TraceRequest, scale_load, spread_buckets


def request(arrival_s: float, *block_ids: int, tokens: int | None = None, output: int = 10) -> TraceRequest:
    return TraceRequest(arrival_s, tokens or 100 * len(block_ids), output, block_ids)


def config(**changes: object) -> SimulationConfig:
    base = SimulationConfig(num_workers=1, cache_blocks=100, block_size_tokens=100, prefill_tokens_per_s=100.0)
    return replace(base, **changes)  # type: ignore[arg-type]


class TestSerialEngine:
    def test_waits_hits_and_rates_are_those_worked_out_by_hand(self) -> None:
        # 100 tokens a block at 100 tokens/s: a block takes a second.
        trace = [request(0, 1, 2, 3), request(1, 1, 2, 4), request(10, 1, 2, 4, 5), request(10, 1, 2, 4, 5)]
        simulation = Simulation(config(), make_policy("round_robin"))
        result = simulation.run(trace)
        # 0-3; hit 2 of 3, 3-4; hit 3 of 4, 10-11; all cached, one token is computed after the one in front, 11-11.01.
        assert simulation.first_token_s == pytest.approx([3, 4, 11, 11.01])
        assert result.hit_rate == pytest.approx((0 + 2 + 3 + 4) / 14)
        assert result.ttft_mean_s == pytest.approx((3 + 3 + 1 + 1.01) / 4)

    def test_an_evicted_block_is_computed_again(self) -> None:
        trace = [request(0, 1, 2), request(10, 3, 4), request(20, 1, 2)]
        assert Simulation(config(cache_blocks=4), make_policy("random")).run(trace).hit_rate == pytest.approx(2 / 6)
        assert Simulation(config(cache_blocks=3), make_policy("random")).run(trace).hit_rate == pytest.approx(1 / 6)
        assert Simulation(config(cache_blocks=2), make_policy("random")).run(trace).hit_rate == 0

    def test_the_oracle_picks_the_sooner_first_token(self) -> None:
        trace = [request(0, *range(10)), request(0, *range(20, 26)), request(1, *range(10), 11), request(2, 99)]
        simulation = Simulation(config(num_workers=2), OraclePolicy())
        simulation.run(trace)
        # third: its holder is free at 10 s and computes 1 block; the other is free at 6 s and would take 11.
        # fourth: unknown; the other worker is free at 6 s.
        assert simulation.first_token_s == pytest.approx([10, 6, 11, 7])


class TestSharedEngine:
    COST = StepCost(base_s=1.0, prefill_token_s=0.01, decode_seq_s=0.5)

    def events(self, engines: SharedEngines, until_s: float) -> list[tuple[float, int, bool]]:
        return [(round(e.time_s, 6), e.request, e.is_first_token) for e in engines.advance(until_s)]

    def test_prefill_and_decode_share_steps(self) -> None:
        engines = SharedEngines(1, self.COST, token_budget=100, max_num_seqs=4)
        engines.submit(0, 0, 150, 3, 0.0)
        engines.submit(1, 0, 49, 1, 0.5)
        # step 1: 100 tokens of request 0, 0-2 s. Step 2: its other 50 and request 1's 49: 2-3.99 s.
        # Then request 0 decodes twice more, 1.5 s each; request 1 has all its output.
        assert self.events(engines, 100) == [(3.99, 0, True), (3.99, 1, True), (3.99, 1, False), (6.99, 0, False)]

    def test_a_newcomer_joins_at_the_next_step_not_after_the_run_of_equal_steps(self) -> None:
        engines = SharedEngines(1, self.COST, token_budget=100, max_num_seqs=4)
        engines.submit(0, 0, 1, 1000, 0.0)  # first token at 1.01, then steps of 1.5 s
        assert self.events(engines, 2) == [(1.01, 0, True)]
        assert engines.pending_prefill_tokens(0, 2) == 0
        engines.submit(1, 0, 10, 5, 2.0)  # the step under way ends at 2.51; with the prefill the next takes 1.6 s
        assert engines.pending_prefill_tokens(0, 2) == 10
        assert self.events(engines, 5) == [(4.11, 1, True)]

    def test_no_more_sequences_than_slots(self) -> None:
        engines = SharedEngines(1, self.COST, token_budget=100, max_num_seqs=1)
        engines.submit(0, 0, 1, 3, 0.0)
        engines.submit(1, 0, 1, 1, 0.0)
        times = self.events(engines, 100)
        assert times == [(1.01, 0, True), (4.01, 0, False), (5.02, 1, True), (5.02, 1, False)]

    def test_runs_of_equal_steps_equal_single_steps(self) -> None:
        """The fast path against the same engine interrupted at every moment."""
        random = Random(3)
        arrivals = sorted((random.random() * 50, random.randrange(1, 400), random.randrange(1, 40)) for _ in range(60))

        def run(pause_s: float) -> list[tuple[float, int, bool]]:
            engines = SharedEngines(2, self.COST, token_budget=64, max_num_seqs=6)
            seen, now_s = [], 0.0
            for number, (arrival_s, num_prompt, num_output) in enumerate(arrivals):
                while now_s < arrival_s:
                    now_s = min(arrival_s, now_s + pause_s)
                    seen += self.events(engines, now_s)
                engines.submit(number, number % 2, num_prompt, num_output, arrival_s)
            return seen + self.events(engines, 1e9)

        assert run(1e9) == run(0.37)
        assert len(run(1e9)) == 120

    def test_newcomers_go_first_with_one_chunk(self) -> None:
        engines = SharedEngines(1, self.COST, token_budget=100, max_num_seqs=3, newcomers_first=True)
        engines.submit(0, 0, 350, 1, 0.0)
        engines.submit(1, 0, 120, 1, 1.0)  # while step 1 computes 100 tokens of request 0, 0-2 s
        engines.submit(2, 0, 30, 1, 3.0)
        # Step 2, 2-4 s: 100 of request 1. Step 3, 4-6 s: all 30 of request 2, 70 of request 0, which goes before the
        # rest of request 1. Steps 4 and 5, 6-10 s: 180 of request 0, then the 20 of request 1.
        assert self.events(engines, 100) == [
            (6.0, 2, True), (6.0, 2, False), (10.0, 0, True), (10.0, 1, True), (10.0, 0, False), (10.0, 1, False)
        ]  # fmt: skip

    def test_a_fit_recovers_the_cost_that_made_the_samples(self) -> None:
        cost = StepCost(0.01, 0.0004, 0.003)
        samples = [StepSample(p, d, cost.duration_s(p, d)) for p in (0, 16, 128, 512) for d in (0, 1, 8)]
        fitted = fit_step_cost(samples)
        assert (fitted.base_s, fitted.prefill_token_s, fitted.decode_seq_s) == pytest.approx((0.01, 0.0004, 0.003))
        assert cost.at_rate(6000, 2048).duration_s(2048, 0) == pytest.approx(2048 / 6000)


class TestParts:
    def test_of_one_prompt_the_deepest_block_is_evicted_first(self) -> None:
        cache = LruCache(3)
        cache.use([1, 2, 3])
        assert cache.use([9]) == ([9], [3])
        assert 1 in cache

    def test_the_index_agrees_with_a_plain_search(self) -> None:
        random = Random(5)
        worker_ids = [WorkerId(f"w{n}") for n in range(70)]
        index = OwnerIndex(worker_ids)
        held: list[set[int]] = [set() for _ in worker_ids]
        for _ in range(3000):
            worker = random.randrange(len(worker_ids))
            blocks = random.sample(range(12), 4)
            if random.random() < 0.7:
                index.add(worker, blocks)
                held[worker].update(blocks)
            else:
                index.remove(worker, blocks)
                held[worker].difference_update(blocks)
        prompt = random.sample(range(12), 8)
        expected = {}
        for worker, blocks_held in enumerate(held):
            depth = next((d for d, block in enumerate(prompt) if block not in blocks_held), len(prompt))
            if depth:
                expected[worker_ids[worker]] = depth
        assert index.match(prompt) == expected
        assert index.num_blocks_of == [len(blocks_held) for blocks_held in held]

    def test_arrivals_of_one_bucket_are_spread_and_others_left_alone(self) -> None:
        bucketed = [request(t, n) for n, t in enumerate([0, 0, 0, 3, 3, 9])]
        spread = spread_buckets(bucketed)
        assert spread != bucketed
        assert all(0 <= r.arrival_s - bucketed[r.block_ids[0]].arrival_s < 3 for r in spread)
        assert spread == sorted(spread, key=lambda r: r.arrival_s)
        exact = [request(t, n) for n, t in enumerate([0, 1.5, 2])]
        assert spread_buckets(exact) == exact


class TestPolicies:
    @pytest.mark.parametrize("name", POLICIES)
    def test_the_same_seed_gives_the_same_run_and_every_request_is_placed(self, name: str) -> None:
        trace = prefix_repetition(GeneratorConfig(400, 20.0), num_prefixes=20, zipf=1.0)
        settings = SimulationConfig(num_workers=4, cache_blocks=200)
        first, second = (Simulation(settings, make_policy(name)) for _ in range(2))
        assert first.run(trace) == second.run(trace)
        assert sum(first.placed) == 400
        assert all(at_s > r.arrival_s for at_s, r in zip(first.first_token_s, trace, strict=True))

    def test_prefix_only_collapses_where_one_prefix_is_hot_and_time_based_costs_do_not(self) -> None:
        trace = prefix_repetition(GeneratorConfig(3000, 12.0), zipf=1.6)
        names = ["ray_prefix", "watchword", "least_tokens", "round_robin"]
        results = run_simulation(trace, SimulationConfig(cache_blocks=400), policies=names)
        assert results["ray_prefix"].ttft_mean_s > 10 * results["watchword"].ttft_mean_s
        assert results["ray_prefix"].imbalance > 3
        assert results["watchword"].ttft_mean_s < results["least_tokens"].ttft_mean_s
        assert results["watchword"].ttft_mean_s < results["round_robin"].ttft_mean_s

    def test_where_nothing_is_shared_prefix_awareness_gains_nothing(self) -> None:
        trace = GENERATORS["unique"](GeneratorConfig(2000, 6.0))
        results = run_simulation(trace, SimulationConfig(), policies=["watchword", "least_tokens"])
        ours, plain = results["watchword"], results["least_tokens"]
        assert ours.hit_rate == plain.hit_rate == 0
        assert ours.ttft_mean_s == pytest.approx(plain.ttft_mean_s, rel=0.1)

    def test_cold_workers_are_used(self) -> None:
        trace = multi_turn(GeneratorConfig(2000, 25.0))
        simulation = Simulation(SimulationConfig(num_workers=16), WatchwordPolicy())
        simulation.run(trace)
        assert min(simulation.placed) > 0.3 * 2000 / 16

    def test_stale_knowledge_of_other_routers_costs_time(self) -> None:
        trace = prefix_repetition(GeneratorConfig(3000, 12.0), zipf=1.0)

        def mean_s(num_routers: int, lag_s: float) -> float:
            settings = SimulationConfig(cache_blocks=400, num_routers=num_routers, lag_s=lag_s)
            return Simulation(settings, WatchwordPolicy()).run(trace).ttft_mean_s

        one, fresh, stale = mean_s(1, 0.0), mean_s(4, 0.1), mean_s(4, 20.0)
        assert fresh < 1.3 * one
        assert stale > 1.5 * one

    @pytest.mark.parametrize("kind", list(EngineKind))
    def test_every_engine_serves_several_routers(self, kind: EngineKind) -> None:
        trace = multi_turn(GeneratorConfig(500, 10.0))
        policies: list[Policy] = [WatchwordPolicy(), OraclePolicy()]
        for policy in policies:
            result = Simulation(SimulationConfig(engine=kind, num_routers=3, lag_s=1.0), policy).run(trace)
            assert 0.5 < result.hit_rate < 1


class TestAdmission:
    """100 tokens a block at 100 tokens/s, one worker, one place, which is free again just after the first token."""

    ONE_PLACE = AdmissionConfig(extra_seqs_per_worker=0, reserved_seqs_per_worker=0)

    def first_tokens(self, trace: list[TraceRequest], admission: AdmissionConfig) -> list[float]:
        simulation = Simulation(config(max_num_seqs=1, decode_token_s=1e-9, admission=admission), WatchwordPolicy())
        result = simulation.run(trace)
        assert sum(each.num_refused for each in result.tenants) == sum(map(math.isnan, simulation.first_token_s))
        return simulation.first_token_s

    def trace(self) -> list[TraceRequest]:
        """Tenant 0 sends four prompts of 2 s at once, tenant 1 one of 1 s a little later."""
        flood = [request(0, 10 + n, 20 + n) for n in range(4)]
        return [*flood, replace(request(0.5, 1), tenant=1)]

    def test_tenants_take_turns(self) -> None:
        assert self.first_tokens(self.trace(), self.ONE_PLACE) == pytest.approx([2, 5, 7, 9, 3])

    def test_who_waits_too_long_is_refused(self) -> None:
        admission = replace(self.ONE_PLACE, max_queue_wait_s=4.5)
        assert self.first_tokens(self.trace(), admission) == pytest.approx([2, 5, math.nan, math.nan, 3], nan_ok=True)

    def test_a_full_queue_sheds_from_the_longest(self) -> None:
        admission = replace(self.ONE_PLACE, max_queued_requests=2)
        assert self.first_tokens(self.trace(), admission) == pytest.approx([2, 5, math.nan, math.nan, 3], nan_ok=True)

    def test_it_has_one_queue(self) -> None:
        with pytest.raises(ValueError, match="num_routers is 2"):
            config(num_routers=2, admission=AdmissionConfig())

    def test_a_flood_drowns_the_others_without_and_not_with_it(self) -> None:
        trace = tenants(GeneratorConfig(600, 8.0))
        settings = SimulationConfig(engine=EngineKind.SHARED, max_num_seqs=8, newcomers_first=True)
        together = Simulation(settings, WatchwordPolicy()).run(trace).tenants
        flood, *others = compare_tenants(trace, settings, "watchword", together)
        assert flood.admitted.ttft_mean_s > 10.0  # the guarded thing is there: more comes than can be served
        for other in others:
            assert other.unguarded.ttft_mean_s > 5.0
            assert other.admitted.ttft_mean_s < 0.25 * other.unguarded.ttft_mean_s
            assert other.admitted.num_refused == 0
            assert other.alone.num_requests == other.admitted.num_requests > 0


class TestGenerators:
    @pytest.mark.parametrize("name", GENERATORS)
    def test_requests_are_in_order_and_as_many_and_as_fast_as_asked(self, name: str) -> None:
        trace = GENERATORS[name](GeneratorConfig(2000, 10.0))
        assert len(trace) == pytest.approx(2000, rel=0.01)
        assert trace == sorted(trace, key=lambda r: r.arrival_s)
        assert len(trace) / trace[-1].arrival_s == pytest.approx(10.0, rel=0.4)

    def test_zipf_concentrates(self) -> None:
        def top_share(zipf: float) -> float:
            firsts = [r.block_ids[0] for r in prefix_repetition(GeneratorConfig(5000), zipf=zipf)]
            return max(firsts.count(block) for block in set(firsts)) / len(firsts)

        assert top_share(0.0) < 0.02
        assert top_share(1.6) == pytest.approx(0.44, abs=0.05)

    def test_tenants_share_no_block(self) -> None:
        owners: dict[int, int] = {}
        for r in tenants(GeneratorConfig(1000)):
            for block in r.block_ids:
                assert owners.setdefault(block, r.tenant) == r.tenant

    def test_a_turn_extends_the_one_before(self) -> None:
        last: dict[int | None, tuple[int, ...]] = {}
        for r in multi_turn(GeneratorConfig(500)):
            before = last.get(r.session, ())
            assert r.block_ids[: len(before)] == before
            last[r.session] = r.block_ids


class TestLoaders:
    def test_mooncake(self, tmp_path: Path) -> None:
        file = tmp_path / "t"
        file.write_text(
            '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}\n'
            '{"timestamp": 4500, "input_length": 10, "output_length": 6, "hash_ids": [7]}\n'
        )
        assert load_trace(file) == [TraceRequest(0.0, 600, 5, (7, 8)), TraceRequest(1.5, 10, 6, (7,))]

    def test_azure(self, tmp_path: Path) -> None:
        file = tmp_path / "t"
        file.write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:15:46.6805900,600,10\n2023-11-16 18:15:50.9951690,20,11\n"
        )
        first, second = load_trace(file)
        assert (first.arrival_s, first.num_prompt_tokens, len(first.block_ids)) == (0.0, 600, 2)
        assert second.arrival_s == pytest.approx(4.314579, abs=1e-5)
        assert not set(first.block_ids) & set(second.block_ids)

    @pytest.mark.parametrize(
        "text", ["", "hello\n", '{"timestamp": 1}\n', "TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,2\n", "{broken\n"]
    )
    def test_what_cannot_be_read_is_said_with_its_place(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "t"
        file.write_text(text)
        with pytest.raises(ValueError, match=str(file)):
            load_trace(file)

    def test_load_scales_arrivals(self) -> None:
        assert [r.arrival_s for r in scale_load([request(0, 1), request(5, 1)], 1.25)] == [0, 4]
        with pytest.raises(ValueError, match="load is 0"):
            scale_load([], 0)


class TestCommand:
    def test_writes_json_and_a_plot(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        out, picture = tmp_path / "o.json", tmp_path / "o.png"
        arguments = ["--generate", "zipf-1.6", "--requests", "300", "--policy", "watchword,lmetric", "--workers", "4"]
        outcome = CliRunner().invoke(app, [*arguments, "--json", str(out), "--plot", str(picture), "--lag", "never"])
        assert outcome.exit_code == 0, outcome.output
        policies = json.loads(out.read_text())["policies"]
        assert list(policies) == ["watchword", "lmetric"]
        for values in policies.values():
            assert {"ttft_mean_s", "ttft_p90_s", "ttft_p99_s", "hit_rate", "imbalance"} <= values.keys()
        assert picture.stat().st_size > 1000
        assert "watchword" in outcome.output

    def test_several_tenants_are_compared(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        out, picture = tmp_path / "o.json", tmp_path / "o.png"
        arguments = ["--generate", "tenants", "--requests", "200", "--policy", "watchword", "--engine", "shared"]
        outcome = CliRunner().invoke(app, [*arguments, "--json", str(out), "--plot", str(picture)])
        assert outcome.exit_code == 0, outcome.output
        fairness = json.loads(out.read_text())["policies"]["watchword"]["fairness"]
        assert [each["tenant"] for each in fairness] == [0, 1, 2, 3]
        assert all({"alone", "without_admission", "with_admission"} <= each.keys() for each in fairness)
        assert "refused" in outcome.output
        assert (tmp_path / "o-watchword-tenants.png").stat().st_size > 1000

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["--generate", "nothing-like-it"],
            ["--generate", "unique", "--policy", "nobody"],
            ["--generate", "unique", "--workers", "0"],
            ["--trace", "/nowhere/at/all"],
        ],
    )
    def test_mistakes_are_told_in_one_line(self, arguments: list[str]) -> None:
        outcome = CliRunner().invoke(app, arguments)
        assert outcome.exit_code == 2
        assert "Traceback" not in outcome.output

    def test_all_means_all(self) -> None:
        assert policy_names("all") == list(POLICIES)
        assert json.loads(to_json({})) == {"policies": {}}
