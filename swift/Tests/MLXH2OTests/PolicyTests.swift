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
        #expect(Array(Policies.names.filter { $0 != "newest" }) == known)
    }

    @Test func settingsComeBackFromTheirNames() throws {
        for name in Policies.names {
            let policy = try Policies.make(name)
            let again = try Policies.make(type(of: policy).name, settings: policy.settings)
            #expect(again.settings == policy.settings)
        }
        let changed = try Policies.make(
            "distinct", settings: ["recent": .int(7), "mass_weight": .int(0), "pool": .int(3)])
        #expect(changed.options.recent == .count(7))
        #expect(!changed.needsAttention)
    }

    @Test func wrongSettingsAreRefused() {
        let wrong: [(String, [String: SettingValue])] = [
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
                try Policies.make(name, settings: settings)
            }
        }
    }

    @Test func aWidePoolIsThatOfItsNeighbours() {
        let mass = MLXArray((0 ..< 40).map { Float(($0 * 7) % 11) }, [1, 1, 40])
        let positions = MLXArray((0 ..< 40).map(Int32.init), [1, 1, 40])
        for width in [1, 3, 5, 7, 39, 4095] {
            let pooled = averagePool(mass, positions: positions, width: width).asArray(Float.self)
            for i in 0 ..< 40 {
                let near = max(i - width / 2, 0) ... min(i + width / 2, 39)
                let sum = near.reduce(Float(0)) { $0 + Float(($1 * 7) % 11) }
                #expect(abs(pooled[i] - sum / Float(width)) < 1e-5, "\(width) \(i)")
            }
        }
    }

    @Test func presetsAreWhatTheySay() throws {
        #expect(Policies.EMALogits.paper.recentSlots(256) == 128)
        #expect(Policies.EMALogits.paper.options.unit == .layer)
        #expect(Policies.H2O.paper.options.sink == 0)
        for configuration in [H2OConfiguration.default, .paper, .h2o, .streaming] {
            try configuration.validate()
        }
        #expect(throws: H2OError.self) { try H2OConfiguration(budget: .tokens(5)) }
        #expect(throws: H2OError.self) { try H2OConfiguration.paper.with(budget: .tokens(100)) }
    }

    /// A policy of one's own: keeps what came last, by its scores alone.
    struct Newest: Policy {
        static let name = "newest"
        var options = PolicyOptions()
        var needsAttention: Bool { false }
        func priority(_ slots: PolicySlots) -> MLXArray { -slots.ages }
    }

    @Test func ownPoliciesWorkLikeAnyOther() throws {
        Policies.register(Newest.self)
        let own = try H2OKVCache(.heads([24, 24]), policy: Newest())
        let streaming = try H2OKVCache(.heads([24, 24]), policy: Policies.Streaming())
        let rows = RowStream(tokens: 60)
        rows.run(own, [30] + ones(30))
        rows.run(streaming, [30] + ones(30))
        #expect(own.keptPositions() == streaming.keptPositions())
        _ = try H2OKVCache.restored(
            Dictionary(uniqueKeysWithValues: own.namedArrays.map { ($0.name, $0.array) }),
            own.configuration)
    }
}
