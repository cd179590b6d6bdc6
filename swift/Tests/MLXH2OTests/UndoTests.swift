import MLX
import MLXLMCommon
import Testing

@testable import MLXH2O

/// Steps taken back, exactly.
@Suite(.serialized) struct UndoTests {
    private func policies() throws -> [any H2OPolicy] {
        try H2OPolicies.names.map { name in
            let recent: [String: H2OSettingValue] = name == "paper" ? ["recent": .int(8)] : [:]
            return try H2OPolicies.make(name, settings: recent)
        } + [
            H2OPolicies.H2O().with { $0.evictEvery = 3 },
            H2OPolicies.EMA().with {
                $0.valueWeighted = true; $0.ageNormalised = true
            },
        ]
    }

    private typealias Store = (name: String, packing: H2OPacking)

    private func policiesInStores() throws -> [(any H2OPolicy, Store)] {
        try policies().flatMap { policy in
            CacheTests.stores
                .filter { $0.packing.recent == nil || policy.recentSlots(20) > 0 }
                .map { (policy, $0) }
        }
    }

    /// A cache for every policy and store, with budgets of each head's own where it may have them.
    private func each(
        undo: Int, _ body: (_ make: () throws -> H2OKVCache, _ label: String) throws -> Void
    ) throws {
        for (policy, store) in sampled(try policiesInStores(), step: 4) {
            let budgets = policy.options.unit == .layer ? [24, 24] : [20, 28]
            // Without the remainder nothing else is done otherwise.
            let remainder = store.name != "packed"
            try body(
                {
                    try H2OKVCache(
                        budgets, policy: policy, remainder: remainder,
                        packing: store.packing, undo: undo)
                }, "\(policy.settings) \(store.name)")
        }
    }

    private func expectSame(_ a: H2OKVCache, _ b: H2OKVCache, _ label: String) throws {
        #expect(a.offset == b.offset, "\(label)")
        #expect(try a.keptPositions() == b.keptPositions(), "\(label)")
        #expect(try a.keptScores() == b.keptScores(), "\(label)")
        #expect(try (a.evictedRemainder == nil) == (b.evictedRemainder == nil), "\(label)")
        for (x, y) in try zip(a.evictedRemainder?.arrays ?? [], b.evictedRemainder?.arrays ?? []) {
            #expect(same(x, y), "\(label)")
        }
    }

    /// What follows is what would have followed without the steps: while the store still grows, in
    /// the step of the first eviction, and after many.
    @Test func trimThenContinueEqualsNeverHavingTakenTheSteps() throws {
        let rows = RowStream(batch: 2, tokens: 60),
            others = RowStream(seed: 9, batch: 2, tokens: 60)
        let ways = [([12], 5), ([18] + ones(2), 4), ([30] + ones(5), 6)]
        var turn = 0
        try each(undo: 6) { make, label in
            // Dense stores go all ways, the others one after the other.
            turn += 1
            for (chunks, n) in label.hasSuffix("dense") ? ways : [ways[turn % 3]] {
                let plain = try make(), undone = try make()
                rows.run(plain, chunks)
                rows.run(undone, chunks)
                others.run(undone, ones(n))
                #expect(undone.undoableSteps >= n && undone.isTrimmable, "\(label)")
                #expect(undone.trim(n) == n, "\(label)")
                try expectSame(undone, plain, "\(label) \(chunks)")
                #expect(same(rows.run(undone, ones(7)), rows.run(plain, ones(7))), "\(label)")
                try expectSame(undone, plain, "\(label) \(chunks) then 7")
            }
        }
    }

    /// A chunk that a draft may be is its tokens one by one.
    @Test func shortChunksAreSingleSteps() throws {
        let rows = RowStream(tokens: 60)
        try each(undo: 4) { make, label in
            let plain = try make(), drafted = try make()
            rows.run(plain, [30] + ones(12))
            rows.run(drafted, [30, 5, 2, 1, 4])
            try expectSame(drafted, plain, label)
            #expect(drafted.trim(3) == 3)
            let short = try make()
            rows.run(short, [30] + ones(9))
            try expectSame(drafted, short, label)
        }
    }

    /// Of a prompt's chunk the end can be taken back until the next token comes: the draft that
    /// mlx-swift-lm appends to what is left of a prompt.
    @Test func chunksCanBeShortened() throws {
        let rows = RowStream(tokens: 60)
        try each(undo: 4) { make, label in
            let plain = try make(), shortened = try make()
            rows.run(plain, [30, 13] + ones(9))
            rows.run(shortened, [30, 16])
            #expect(shortened.undoableSteps == 4 && shortened.trim(1) == 1, "\(label)")
            #expect(shortened.trim(2) == 2, "\(label)")
            rows.run(shortened, ones(9))
            try expectSame(shortened, plain, label)
        }
    }

    @Test func arrayMasksAreReadColumnByColumn() throws {
        let rows = RowStream(tokens: 40)
        func answer(_ cache: H2OKVCache, _ lengths: [Int], _ mask: (Int) -> MLXArray) -> MLXArray {
            joined(
                lengths.map { length in
                    let range = cache.offset ..< cache.offset + length
                    return cache.attend(
                        queries: rows.queries[0..., 0..., range],
                        keys: rows.keys[0..., 0..., range], values: rows.values[0..., 0..., range],
                        scale: 0.2, mask: .array(mask(length)))
                }, axis: 2)
        }
        let caches = try (0 ..< 2).map { _ in
            try H2OKVCache([20, 20], policy: H2OPolicies.H2O(), undo: 4)
        }
        for cache in caches { rows.run(cache, [24]) }
        let whole = answer(caches[0], [4]) { createCausalMask(n: $0, offset: 20) }
        let single = answer(caches[1], ones(4)) { _ in MLXArray.ones([1, 21], dtype: .bool) }
        #expect(same(whole, single))
    }

    @Test func moreThanTheJournalHoldsIsRefused() throws {
        let rows = RowStream(tokens: 60)
        let cache = try H2OKVCache([20, 20], undo: 3)
        rows.run(cache, [30] + ones(9))
        #expect(cache.undoableSteps == 3 && cache.isTrimmable)
        #expect(throws: H2OError.self) { try cache.undoSteps(4) }
        #expect(throws: H2OError.self) { try cache.undoSteps(-1) }
        try cache.undoSteps(2)
        #expect(cache.offset == 37 && cache.undoableSteps == 1)
        rows.run(cache, ones(5))
        #expect(cache.trim(0) == 0 && cache.trim(-3) == 0 && cache.trim(3) == 3)
        try cache.resize([16])
        #expect(cache.undoableSteps == 0)
        #expect(cache.trim(1) == 0 && cache.offset == 39 && cache.failure != nil)
        #expect(throws: H2OError.self) { try H2OKVCache([64, 64], undo: -1) }
        #expect(throws: H2OError.self) {
            try H2OKVCache(
                [64, 64], policy: H2OPolicies.Streaming(), attends: false, undo: 1)
        }
        #expect(throws: H2OError.self) { try H2OConfiguration(budget: .tokens(64), undo: -1) }
    }

    /// What callers are told beforehand.
    @Test func trimmableIsWhatCanBeTrimmed() throws {
        let rows = RowStream(tokens: 60)
        let without = try H2OKVCache([20, 20])
        #expect(!without.isTrimmable)  // it would not stay so, and is asked once
        rows.run(without, [10])
        #expect(without.isTrimmable && without.isTrimmable(after: 10))
        #expect(!without.isTrimmable(after: 11))
        rows.run(without, [11])
        #expect(!without.isTrimmable && without.trim(1) == 0)
        let with = try H2OKVCache([20, 20], undo: 4)
        #expect(with.isTrimmable && with.isTrimmable(after: 20) && !with.isTrimmable(after: 21))
        rows.run(with, [30])
        #expect(with.isTrimmable && with.isTrimmable(after: 4) && !with.isTrimmable(after: 5))
    }

    @Test func copiesKeepTheJournalAndFilesDoNot() throws {
        let rows = RowStream(tokens: 60)
        let cache = try H2OKVCache([20, 28], policy: H2OPolicies.H2O(), undo: 4)
        rows.run(cache, [30] + ones(6))
        let copy = cache.copy() as! H2OKVCache
        #expect(cache.trim(4) == 4 && copy.trim(4) == 4)
        try expectSame(copy, cache, "copy")
        let twin = try H2OKVCache([20, 28], policy: H2OPolicies.H2O(), undo: 4)
        rows.run(cache, ones(4))
        twin.state = cache.state
        twin.metaState = cache.metaState
        #expect(twin.undoableSteps == 0 && twin.undo == 4)
        #expect(same(rows.run(twin, ones(5)), rows.run(cache, ones(5))))
    }

    /// The journal is counted and bounded: also in a budget of bytes.
    @Test func memoryIsCountedAndBounded() throws {
        let policies: [any H2OPolicy] = [
            H2OPolicies.Distinct(), H2OPolicies.Streaming(), H2OPolicies.H2O(),
        ]
        for (name, packing) in CacheTests.stores {
            for policy in sampled(policies, step: 2) {
                if packing.recent != nil && policy.recentSlots(20) == 0 { continue }
                let bytes = name == "dense" ? 40_000 : 16_000, rows = RowStream(tokens: 300)
                let cache = try plannedCache(
                    .bytes(bytes), policy: policy, packing: packing, undo: 5)
                rows.run(cache, [120] + ones(80))
                let full = cache.nbytes, none = cache.namedArrays.reduce(0) { $0 + $1.array.nbytes }
                #expect(full > none && full <= bytes, "\(name) \(full)")
                rows.run(cache, ones(100))
                #expect(cache.nbytes == full, "\(name)")
            }
        }
    }
}
