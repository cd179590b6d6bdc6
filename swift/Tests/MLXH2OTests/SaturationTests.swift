import Foundation
import MLX
import Testing

@testable import MLXH2O

/// Where the remainder's second-order term saturates, head by head.
@Suite struct SaturationTests {
    private let numbers = GoldenCase(group: "", name: "", parameters: .object(["seed": .int(3)]))

    private func remainder(heads: Int) -> H2ORemainder {
        H2ORemainder([
            MLXArray.full([1, heads], values: MLXArray(Float(40))),
            numbers.tensor(.meanKey, [1, heads, 32]),
            square(numbers.tensor(.variance, [1, heads, 32])),
            numbers.tensor(.meanValue, [1, heads, 32]),
        ])
    }

    @Test func eachHeadHasItsOwn() throws {
        let queries = numbers.tensor(.q, [1, 4, 3, 32]), remainder = remainder(heads: 2)
        let actual = try EngineSteps.column(
            remainder, queries: queries, scale: 0.2, saturation: [0, 2.5])
        for (head, t) in [Float(0), 2.5].enumerated() {
            let varKey = remainder.varKey[0..., head ..< head + 1]
            let meanKey = remainder.meanKey[0..., head ..< head + 1]
            let q = queries[0..., head * 2 ..< head * 2 + 2] * Float(0.2)
            let x = 0.5 * (square(q) * varKey.expandedDimensions(axis: 2)).sum(axis: -1)
            let mean = (q * meanKey.expandedDimensions(axis: 2)).sum(axis: -1)
            let term = t == 0 ? MLXArray.zeros(x.shape) : x / sqrt(1 + x / t)
            let expected = log(Float(40)) + mean + term
            let apart = abs(actual[0..., head * 2 ..< head * 2 + 2] - expected)
            #expect(apart.max().item(Float.self) < 1e-4)
        }
        // Where x is 0 too, 0 stays a number.
        let zero = try EngineSteps.column(
            remainder, queries: queries * Float(0), scale: 1, saturation: [0])
        #expect(abs(zero - log(Float(40))).max().item(Float.self) < 1e-5)
    }

    /// Of heads that all have one, the outputs are those of that one; of others each head's own.
    @Test func cachesAnswerByTheirHeads() throws {
        let rows = RowStream(tokens: 60), chunks = [30, 10] + ones(20)
        func cache(_ saturation: [Float]) throws -> H2OKVCache {
            try H2OKVCache(
                [20, 24], policy: H2OPolicies.Streaming(), saturation: saturation)
        }
        let first = try rows.run(cache([0]), chunks), usual = try rows.run(cache([4]), chunks)
        let mixed = try rows.run(cache([0, 4]), chunks)
        #expect(same(mixed[0..., 0 ..< 2], first[0..., 0 ..< 2]))
        #expect(same(mixed[0..., 2...], usual[0..., 2...]))
        #expect(!same(first, usual))
        let none = try H2OKVCache([20, 24], policy: H2OPolicies.Streaming())
        #expect(same(rows.run(none, chunks), usual))
    }

    @Test func filesKeepThem() throws {
        let file = temporaryFile(), rows = RowStream(tokens: 60)
        defer { try? FileManager.default.removeItem(at: file) }
        for saturation in [[0], [4], [0, 2.5]] as [[Float]] {
            let cache = try H2OKVCache([20, 28], saturation: saturation)
            rows.run(cache, [30] + ones(10))
            try H2OKVCache.saveCaches([cache], to: file)
            let loaded = try H2OKVCache.loadedCaches(from: file).caches[0] as! H2OKVCache
            #expect(loaded.saturation == saturation)
            #expect(same(rows.run(loaded, ones(9)), rows.run(cache, ones(9))))
        }
        // As a file from before there were several.
        var json = try H2OKVCache([20, 28]).configuration.object!
        json["saturation"] = nil
        #expect(try CacheSettings(.object(json)).saturation == [H2ORemainder.saturation])
        for wrong in [.string("4"), .array([]), .array([.int(4), .null]), .double(-1)]
            as [H2OSettingValue]
        {
            json["saturation"] = wrong
            #expect(throws: H2OError.self) { try CacheSettings(.object(json)).engine() }
        }
    }

    @Test func whatCannotBeIsRefused() throws {
        for wrong in [[], [-1], [.nan], [.infinity], [4, -1]] as [[Float]] {
            #expect(throws: H2OError.self) { try H2OKVCache([64, 64], saturation: wrong) }
        }
        #expect(throws: H2OError.self) {
            try H2OKVCache(
                [64, 64], policy: H2OPolicies.Streaming(), attends: false, saturation: [0])
        }
        let settings = try CacheSettings(
            [64, 64], policy: H2OPolicies.Streaming(), remainder: true, attends: true,
            packing: .dense, undo: 0, saturation: [1, 2, 3])
        #expect(throws: H2OError.self) { try settings.engine() }
    }
}
