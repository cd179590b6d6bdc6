import MLX
import Testing

@testable import MLXH2O

/// Positions of slots: 16 bits while a conversation has no more of them, and bytes that hold.
@Suite(.serialized) struct PositionTests {
    private static let few = Limits.fewPositions
    /// With a few more tokens than 16 bits have positions for.
    private let rows = RowStream(heads: 2, tokens: few + 20)

    /// A cache that has seen so many tokens.
    private func fed(_ tokens: Int, _ budgets: [Int], _ packing: H2OPacking, undo: Int = 0)
        throws -> H2OKVCache
    {
        let cache = try H2OKVCache(
            budgets, policy: H2OPolicies.Salient(), packing: packing, undo: undo)
        feed(cache, to: tokens)
        return cache
    }

    private func feed(_ cache: H2OKVCache, to tokens: Int) {
        while cache.offset < tokens { rows.run(cache, [min(2048, tokens - cache.offset)]) }
    }

    private func dtype(_ cache: H2OKVCache) -> DType {
        cache.namedArrays.first { $0.name == "slots.positions" }!.array.dtype
    }

    /// Token by token up to where 16 bits end, and beyond: each head keeps its newest tokens.
    @Test func narrowThenWide() throws {
        for (name, packing) in CacheTests.stores {
            let cache = try fed(Self.few - 6, [24, 31], packing)
            // As it goes on from a file, on the other side of the border.
            rows.run(cache, ones(6))
            #expect(dtype(cache) == .int16, "\(name)")
            let arrays = Dictionary(
                uniqueKeysWithValues: cache.namedArrays.map { ($0.name, $0.array) })
            let twin = try H2OKVCache.restored(arrays, cache.configuration)
            #expect(same(rows.run(cache, ones(12)), rows.run(twin, ones(12))), "\(name)")
            #expect(dtype(cache) == .int32, "\(name)")
            let newest = H2OPolicies.Salient().recentSlots(24), end = Self.few + 12
            for head in try cache.keptPositions()[0] {
                #expect(Array(head.suffix(newest)) == Array(end - newest ..< end), "\(name)")
                #expect(head == head.sorted() && Set(head).count == head.count, "\(name)")
            }
        }
    }

    @Test func stepsTakenBackTakeTheWidthBack() throws {
        let cache = try fed(Self.few - 2, [24, 31], .dense, undo: 6)
        let before = try cache.keptPositions()
        rows.run(cache, ones(5))
        #expect(dtype(cache) == .int32)
        #expect(cache.trim(5) == 5)
        #expect(dtype(cache) == .int16)
        #expect(try cache.keptPositions() == before)
    }

    @Test func pinsStayPinned() throws {
        let cache = try fed(Self.few - 4, [24, 31], .dense)
        _ = try cache.pin([Self.few - 1 ..< Self.few])
        rows.run(cache, ones(20))
        #expect(dtype(cache) == .int32)
        #expect(try cache.keptPositions()[0].allSatisfy { $0.contains(Self.few - 1) })
    }

    /// More slots while positions take 2 bytes.
    @Test func bytesHoldBeforeAndAfter() throws {
        for (name, packing) in CacheTests.stores {
            let bytes = 60_001, cache = try plannedCache(.bytes(bytes), packing: packing)
            feed(cache, to: Self.few - 4)
            let before = cache.budgets!
            #expect(cache.nbytes <= bytes && cache.nbytes > bytes * 8 / 10, "\(name)")
            for _ in 0 ..< 8 {
                rows.run(cache, [1])
                #expect(cache.nbytes <= bytes && cache.nbytes > bytes * 8 / 10, "\(name)")
            }
            #expect(zip(before, cache.budgets!).allSatisfy { $0 > $1 }, "\(name)")
        }
    }

    @Test func aPackedSlotTakesSixBytesBesideItsRow() throws {
        let cache = try fed(200, [32, 32], CacheTests.stores[1].packing)
        let beside = cache.namedArrays.filter {
            $0.name.hasPrefix("slots.") && !$0.name.hasPrefix("slots.keys")
                && !$0.name.hasPrefix("slots.values")
        }
        #expect(beside.reduce(0) { $0 + $1.array.nbytes } == 6 * 64)
    }

    @Test func aLaterPlanFollowsANarrowOne() {
        let few = Limits.fewPositions
        let narrow = SlotPlan(
            budgets: [40],
            later: [Stage(beyond: 40, budgets: [41]), Stage(beyond: few, budgets: [42])])
        let wide = SlotPlan(
            budgets: [38],
            later: [Stage(beyond: 38, budgets: [37]), Stage(beyond: few + 9, budgets: [36])])
        #expect(
            narrow.whileNarrow(then: wide)
                == SlotPlan(
                    budgets: [40],
                    later: [
                        Stage(beyond: 40, budgets: [41]), Stage(beyond: few, budgets: [37]),
                        Stage(beyond: few + 9, budgets: [36]),
                    ]))
    }
}
