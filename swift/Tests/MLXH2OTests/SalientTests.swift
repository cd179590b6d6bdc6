import MLX
import Testing

@testable import MLXH2O

/// The policy "salient", and the lengths of values by which it ranks: kept beside dense ones, told by
/// the scales of packed ones.
@Suite(.serialized) struct SalientTests {
    private let stores =
        CacheTests.stores + [
            ("wide window", try! H2OPacking(keyBits: 2, valueBits: 2, groupSize: 32, recentBits: 8))
        ]

    /// log ||v||^2 of the tokens held, by the positions that they have.
    private func expected(_ rows: RowStream, _ positions: [[Int]]) -> [[Float]] {
        positions.enumerated().map { head, places in
            places.map { position in
                let length = log(square(rows.values[0, head, position].asType(.float32)).sum())
                return length.asType(.float16).asType(.float32).item(Float.self)
            }
        }
    }

    /// The lengths kept beside dense values, in order of position.
    private func held(_ cache: H2OKVCache) -> [[Float]] {
        cache.stored("value_lengths").map {
            #expect($0.dtype == .float16)
            return $0[0].asType(.float32).asArray(Float.self)
        }
    }

    /// Through slots, chunks, resizing and steps taken back, each token has its own length; packed ones
    /// keep none.
    @Test func lengthsGoWithTheirRows() throws {
        let rows = RowStream(tokens: 120)
        for (name, packing) in stores {
            let cache = try H2OKVCache(
                [20, 28], policy: H2OPolicies.Salient(), packing: packing, undo: 3)
            func check(_ step: String) {
                guard !packing.packs else {
                    let kept = cache.namedArrays.contains { $0.name == "slots.value_lengths" }
                    #expect(!kept, "\(name) \(step)")
                    return
                }
                let own = try! expected(rows, cache.keptPositions()[0])
                let apart = zip(held(cache), own).flatMap { zip($0, $1).map { abs($0 - $1) } }
                #expect(apart.max()! < 1e-6, "\(name) \(step)")
            }
            rows.run(cache, [12])
            check("prompt")
            rows.run(cache, [20] + ones(20))
            check("steps")
            #expect(cache.trim(3) == 3)
            check("undo")
            rows.run(cache, [9] + ones(4))
            try cache.resize([16, 24])
            check("resize")
            rows.run(cache, ones(9))
            check("after")
        }
    }

    @Test func zeroValuesHaveALength() throws {
        let cache = try H2OKVCache([20, 28]), rows = RowStream(tokens: 9)
        let zeros = MLXArray.zeros([1, 2, 9, 32])
        _ = cache.attend(
            queries: rows.queries, keys: rows.keys, values: zeros, scale: 0.18, mask: .causal)
        #expect(held(cache).joined().allSatisfy { abs($0 + 27.63) < 0.02 })
    }

    /// Files from before lengths were kept: those of the rows as they are stored.
    @Test func olderFilesGetThemFromTheRows() throws {
        let rows = RowStream(tokens: 80)
        for (name, packing) in stores {
            let cache = try H2OKVCache(
                [20, 28], policy: H2OPolicies.Salient(), packing: packing)
            rows.run(cache, [30] + ones(10))
            var arrays = Dictionary(
                uniqueKeysWithValues: cache.namedArrays.map { ($0.name, $0.array) })
            // Those of packed values were kept too, and positions in 32 bits.
            for prefix in packing.recent == nil ? ["slots"] : ["slots", "recent"] {
                let shape = arrays[prefix + ".scores"]!.shape
                arrays[prefix + ".value_lengths"] =
                    packing.packs ? MLXArray.zeros(shape, dtype: .float16) : nil
            }
            arrays["slots.positions"] = arrays["slots.positions"]!.asType(.int32)
            let older = try H2OKVCache.restored(arrays, cache.configuration)
            #expect(older.namedArrays.map(\.name) == cache.namedArrays.map(\.name))
            #expect(same(rows.run(older, ones(20)), rows.run(cache, ones(20))), "\(name)")
            guard !packing.packs else { continue }
            arrays["slots.value_lengths"] = MLXArray.zeros([1, 3], dtype: .float16)
            #expect(throws: H2OError.self) {
                try H2OKVCache.restored(arrays, cache.configuration)
            }
        }
    }

    /// Policies that do not use them have none.
    @Test func othersHaveNone() throws {
        let cache = try H2OKVCache([20, 28], policy: H2OPolicies.Distinct())
        RowStream(tokens: 30).run(cache, [30])
        #expect(!cache.namedArrays.contains { $0.name.hasSuffix("value_lengths") })
    }

    /// Each weight does what it says: with it alone, the least of its term goes first.
    @Test func eachTermCounts() throws {
        let numbers = GoldenCase(group: "", name: "", parameters: .object(["seed": .int(8)]))
        let keys = numbers.tensor(.k, [1, 1, 24, 32]), values = numbers.tensor(.v, [1, 1, 24, 32])
        let slots = EngineSteps.Slots(
            keys: keys, values: values, positions: positions(0 ..< 24).reshaped([1, 1, 24]),
            scores: MLXArray.zeros([1, 1, 24]), evictedMeanKey: keys[0..., 0..., 7], offset: 24,
            evicted: 40)
        func least(_ change: (inout H2OPolicies.Salient) -> Void) throws -> Int {
            var policy = H2OPolicies.Salient()
            (policy.distanceWeight, policy.valueWeight, policy.ageWeight) = (0, 0, 0)
            change(&policy)
            let all = MLXArray.ones([1, 1, 24], dtype: .bool)
            let priority = try EngineSteps.priority(policy, slots, evictable: all)
            return argMin(priority, axis: -1).item(Int.self)
        }
        #expect(try least { $0.distanceWeight = 1 } == 7)
        let shortest = argMin(square(values).sum(axis: -1), axis: -1).item(Int.self)
        #expect(try least { $0.valueWeight = 1 } == shortest)
        #expect(try least { $0.ageWeight = 1 } == 0)
    }
}
