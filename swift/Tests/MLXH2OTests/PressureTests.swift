import Foundation
import MLX
import MLXLMCommon
import Testing

@testable import MLXH2O

/// Budgets that are lowered while conversations go on, before they begin, and after they are loaded.
@Suite(.serialized) struct PressureTests {
    private func lowered(to fraction: Double) throws -> H2OMemoryPressure {
        let pressure = H2OMemoryPressure()
        try pressure.lower(toFraction: fraction)
        return pressure
    }

    private func tokensHeld(_ cache: H2OKVCache) -> [Float] {
        try! zip(cache.keptPositions()[0], cache.evictedRemainder!.count.asArray(Float.self))
            .map { Float($0.count) + $1 }
    }

    @Test func conversationsThatBeginUnderPressureAreLowered() throws {
        for (name, packing) in CacheTests.stores {
            for attends in [true, false] where attends || !packing.packs {
                let policy = H2OPolicies.Distinct.keysOnly
                let cache = try H2OKVCache(
                    [48, 48], policy: policy, attends: attends, packing: packing,
                    pressure: lowered(to: 0.5))
                RowStream(tokens: 90).run(cache, [60] + ones(30))
                let full = cache.fullBudgets![0]
                #expect(cache.budgets == [full / 2, full / 2], "\(name) \(attends)")
                #expect(tokensHeld(cache) == [90, 90], "\(name) \(attends)")
            }
        }
    }

    @Test func newConversationsOfAModelAreServedAndGrowBack() throws {
        let pressure = H2OMemoryPressure(), model = try ModelTests.stock()
        let configuration = try H2OConfiguration(budget: .tokens(64), pressure: pressure)
        func conversation() throws -> [H2OKVCache] {
            let caches = try configuration.caches(for: model).map { $0 as! H2OKVCache }
            #expect(try ModelTests.generated(model, caches, prompt: 70, tokens: 20).count == 20)
            return caches
        }
        let first = try conversation(), full = first[0].budgets![0]
        try pressure.lower(toFraction: 0.5)
        let second = try conversation()
        #expect(second.allSatisfy { $0.budgets == [full / 2, full / 2] })
        pressure.end()
        let third = try conversation()
        #expect(third.allSatisfy { $0.budgets == [full, full] })
        // What was given away is not asked back.
        #expect(try ModelTests.generated(model, second, prompt: 10, tokens: 5).count == 5)
        #expect(second.allSatisfy { $0.budgets == [full / 2, full / 2] })
        // And a later warning is obeyed again.
        try pressure.lower(toFraction: 0.25)
        #expect(try ModelTests.generated(model, third, prompt: 10, tokens: 5).count == 5)
        #expect(third.allSatisfy { $0.budgets![0] < full / 2 })
    }

    /// Two conversations of one configuration, taking turns layer by layer as two threads may.
    @Test func conversationsSideBySideDoNotDisturbEachOther() throws {
        let pressure = H2OMemoryPressure(), model = try ModelTests.stock()
        let configuration = try H2OConfiguration(budget: .tokens(64), pressure: pressure)
        let rows = RowStream(tokens: 120)
        let two = try (0 ..< 2).map { _ in
            try configuration.caches(for: model).map { $0 as! H2OKVCache }
        }
        for layer in two[0] { rows.run(layer, [60]) }
        for layer in two[1] { rows.run(layer, [80]) }
        rows.run(two[0][0], [1])
        try pressure.lower(toFraction: 0.5)
        rows.run(two[1][0], [1])
        for (a, b) in zip(two[0], two[1]).dropFirst() {
            rows.run(a, [1])
            rows.run(b, [1])
        }
        for layers in two {
            #expect(Set(layers.map(\.physicalLength)).count == 1)
            #expect(Set(layers.map { $0.budgets! }).count == 1)
        }
    }

    @Test func loadedCachesObey() throws {
        let file = temporaryFile(), pressure = H2OMemoryPressure()
        defer { try? FileManager.default.removeItem(at: file) }
        let rows = RowStream(tokens: 90)
        let saved = try (0 ..< 2).map { _ in try H2OKVCache([40, 40]) }
        for cache in saved { rows.run(cache, [50] + ones(10)) }
        try H2OKVCache.saveCaches(saved, to: file)
        let loaded = try H2OKVCache.loadedCaches(from: file, pressure: pressure).caches
            .map { $0 as! H2OKVCache }
        for cache in loaded { rows.run(cache, ones(5)) }
        #expect(loaded[0].budgets == [40, 40])
        try pressure.lower(toFraction: 0.5)
        for cache in loaded { rows.run(cache, ones(5)) }
        for cache in loaded {
            #expect(cache.budgets == [20, 20])
            #expect(tokensHeld(cache) == [70, 70])
        }
    }

    @Test func fractionsOutOfRangeAreRefused() throws {
        let pressure = H2OMemoryPressure()
        for fraction in [0, -1, 1.5, .nan, .infinity] {
            #expect(throws: H2OError.self) { try pressure.lower(toFraction: fraction) }
        }
        #expect(pressure.fraction == 1)
        try pressure.lower(toFraction: 1)
        try pressure.lower(toFraction: 1e-9)
        let cache = try H2OKVCache([32, 32], pressure: pressure)
        RowStream(tokens: 60).run(cache, [40] + ones(20))
        #expect(cache.budgets![0] >= cache.policy.leastBudget)
    }
}
