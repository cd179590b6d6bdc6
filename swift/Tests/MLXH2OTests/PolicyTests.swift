import Foundation
import MLX
import Testing

@testable import MLXH2O

@Suite struct PolicyTests {
    @Test func namesAreThoseOfPython() {
        let known = [
            "distinct", "ema", "ema-logits", "h2o", "keydiff", "salient", "streaming", "tova",
            "paper", "h2o-paper",
        ]
        #expect(Array(H2OPolicies.names.filter { $0 != "newest" }) == known)
    }

    @Test func settingsComeBackFromTheirNames() throws {
        for name in H2OPolicies.names {
            let policy = try H2OPolicies.make(name)
            let again = try H2OPolicies.make(policy.name, settings: policy.settings)
            #expect(again.settings == policy.settings)
        }
        let changed = try H2OPolicies.make(
            "distinct", settings: ["recent": .int(7), "mass_weight": .int(0), "pool": .int(3)])
        #expect(changed.options.recent == .count(7))
        #expect(!changed.needsAttention)
    }

    @Test func wrongSettingsAreRefused() {
        let wrong: [(String, [String: H2OSettingValue])] = [
            ("heavy", [:]), ("h2o", ["decay": .double(0.5)]), ("ema", ["decay": .double(1)]),
            ("h2o", ["sink": .int(-1)]), ("h2o", ["recent": .double(1)]),
            ("h2o", ["pool": .int(4)]),
            ("h2o", ["unit": .string("model")]), ("streaming", ["age_normalised": .bool(true)]),
            ("tova", ["evict_every": .int(0)]),
            ("h2o", ["sink": .int(1 << 30 + 1)]), ("h2o", ["recent": .int(1 << 30 + 1)]),
            ("h2o", ["evict_every": .int(1 << 16 + 1)]), ("h2o", ["window": .int(1 << 31)]),
            ("h2o", ["pool": .int(500_001)]), ("h2o", ["recent": .double(1 - 0x1p-53)]),
            ("salient", ["age_weight": .double(1e19)]),
        ]
        for (name, settings) in wrong {
            #expect(throws: H2OError.self, "\(name) \(settings)") {
                try H2OPolicies.make(name, settings: settings)
            }
        }
    }

    @Test func presetsAreWhatTheySay() throws {
        #expect(H2OPolicies.EMALogits.paper.recentSlots(256) == 128)
        #expect(H2OPolicies.EMALogits.paper.options.unit == .layer)
        #expect(H2OPolicies.H2O.paper.options.sink == 0)
        for configuration in [H2OConfiguration.default, .paper, .h2o, .streaming] {
            try configuration.validate()
        }
        #expect(throws: H2OError.self) { try H2OConfiguration(budget: .tokens(5)) }
        #expect(throws: H2OError.self) { try H2OConfiguration.paper.with(budget: .tokens(100)) }
    }

    /// Policies of one's own: by closures alone.
    private let newest = H2OPolicies.Own(name: "newest", needsAttention: false) { -$0.ages }

    @Test func ownPoliciesWorkLikeAnyOther() throws {
        H2OPolicies.register(newest)
        let own = try H2OKVCache([24, 24], policy: newest)
        let streaming = try H2OKVCache([24, 24], policy: H2OPolicies.Streaming())
        let rows = RowStream(tokens: 90)
        rows.run(own, [30] + ones(30))
        rows.run(streaming, [30] + ones(30))
        #expect(try own.keptPositions() == streaming.keptPositions())
        let twin = try H2OKVCache.restored(
            Dictionary(uniqueKeysWithValues: own.namedArrays.map { ($0.name, $0.array) }),
            own.configuration)
        #expect(same(rows.run(twin, ones(20)), rows.run(own, ones(20))))
        #expect(try twin.keptPositions() == own.keptPositions())
    }

    /// What a policy of ours does, said in closures.
    @Test func ownPoliciesSeeWhatOursSee() throws {
        let heavy = H2OPolicies.Own(name: "heavy") { scores, seen in
            scores + (seen.standsFor.map { seen.mass * $0 } ?? seen.mass)
        } priority: {
            $0.scores!
        }
        let summed = H2OPolicies.Own(name: "summed") { $0.scores! }
        let rows = RowStream(tokens: 90)
        for (policy, prompt) in [
            (heavy, H2OPolicyOptions.Prompt.full), (summed, .full), (summed, .window),
        ] {
            let ours = try H2OKVCache(
                [20, 28], policy: H2OPolicies.H2O().with { $0.prompt = prompt })
            let expected = rows.run(ours, [30, 10] + ones(30))
            let own = try H2OKVCache(
                [20, 28], policy: policy.with { $0.prompt = prompt })
            let actual = rows.run(own, [30, 10] + ones(30))
            #expect(
                allClose(actual, expected, atol: 1e-5).item(Bool.self), "\(policy.name) \(prompt)")
            #expect(try own.keptPositions() == ours.keptPositions(), "\(policy.name) \(prompt)")
        }
    }

    @Test func ownPoliciesAreLetGo() throws {
        final class Held: Sendable {}
        weak var held: Held?
        do {
            let object = Held()
            held = object
            let policy = H2OPolicies.Own(name: "holding", needsAttention: false) { [object] slots in
                withExtendedLifetime(object) { slots.ages }
            }
            let cache = try H2OKVCache([24, 24], policy: policy)
            RowStream(tokens: 40).run(cache, [30] + ones(9))
            #expect(cache.evicted > 0 && held != nil)
        }
        #expect(held == nil)
    }

    #if os(macOS) || os(Linux)  // where exit tests exist
        @Test func anOwnPolicyThatThrowsStops() async {
            await #expect(processExitsWith: .failure) {
                let failing = H2OPolicies.Own(name: "failing") { _ in throw H2OError.policy("no") }
                let cache = try H2OKVCache([24, 24], policy: failing)
                RowStream(tokens: 40).run(cache, [30])
            }
        }
    #endif
}
