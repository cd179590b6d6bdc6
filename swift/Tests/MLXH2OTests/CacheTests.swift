import Foundation
import MLX
import MLXLMCommon
import Testing

@testable import MLXH2O

#if canImport(DispatchMemoryPressure)
    import Dispatch
    import DispatchMemoryPressure
#endif

/// Properties of the cache that hold for every policy and store.
@Suite(.serialized) struct CacheTests {
    static let stores: [(name: String, packing: H2OPacking)] = [
        ("dense", .dense),
        ("packed", try! H2OPacking(keyBits: 8, valueBits: 4, groupSize: 32)),
        ("mixed", try! H2OPacking(keyBits: 4, valueBits: 4, groupSize: 32, recentBits: 16)),
    ]

    private func policies() throws -> [any H2OPolicy] {
        try H2OPolicies.names.map { name in
            let recent: [String: H2OSettingValue] = name == "paper" ? ["recent": .int(8)] : [:]
            return try H2OPolicies.make(name, settings: recent)
        }
    }

    @Test func budgetHoldsAndNothingIsLost() throws {
        for policy in try policies() {
            for (name, packing) in Self.stores where packing.recent == nil || name == "mixed" {
                if packing.recent != nil && policy.recentSlots(20) == 0 { continue }
                let budgets = policy.options.unit == .layer ? [24, 24] : [20, 28]
                let cache = try H2OKVCache(
                    budgets, policy: policy, packing: packing)
                RowStream(tokens: 80).run(cache, [30, 10] + ones(40))
                let kept = try cache.keptPositions()[0], label = "\(policy.name) \(name)"
                #expect(kept.map(\.count) == budgets, "\(label)")
                let sinks = Array(0 ..< policy.options.sink)
                for (head, budget) in zip(kept, budgets) {
                    #expect(Array(head.prefix(policy.options.sink)) == sinks, "\(label)")
                    let recent = policy.recentSlots(budget)
                    #expect(Array(head.suffix(recent)) == Array(80 - recent ..< 80), "\(label)")
                }
                // Every token is a slot's or the remainder's.
                let folded = try cache.evictedRemainder!.count.asArray(Float.self)
                #expect(
                    zip(folded, budgets).allSatisfy { $0 + Float($1) == 80 }, "\(label) \(folded)")
            }
        }
    }

    @Test func underBudgetItIsPlainAttention() throws {
        for (_, packing) in Self.stores.prefix(1) {
            let rows = RowStream(tokens: 40), plain = KVCacheSimple()
            let cache = try H2OKVCache([80, 80], packing: packing)
            for length in [20, 7] + ones(13) {
                let range = plain.offset ..< plain.offset + length
                let expected = h2oAttention(
                    queries: rows.queries[0..., 0..., range], keys: rows.keys[0..., 0..., range],
                    values: rows.values[0..., 0..., range], cache: plain, scale: 0.18,
                    mask: length == 1 ? .none : .causal)
                let actual = rows.run(cache, [length])
                #expect(abs(actual - expected).max().item(Float.self) < 1e-5)
            }
        }
    }

    @Test func copyIsIndependent() throws {
        for (name, packing) in Self.stores {
            let rows = RowStream(tokens: 70)
            let cache = try H2OKVCache(
                [20, 28], policy: H2OPolicies.H2O(), packing: packing)
            rows.run(cache, [30] + ones(9))
            let copy = cache.copy() as! H2OKVCache
            let first = rows.run(cache, ones(20))
            #expect(copy.offset == 39)
            #expect(same(rows.run(copy, ones(20)), first), "\(name)")
            #expect(try copy.keptPositions() == cache.keptPositions())
        }
    }

    @Test func stateAndMetaStateGoThroughAnotherCache() throws {
        for (name, packing) in Self.stores {
            let rows = RowStream(tokens: 60)
            let cache = try H2OKVCache([20, 28], packing: packing)
            rows.run(cache, [30] + ones(10))
            let twin = try H2OKVCache([20, 28], packing: packing)
            twin.state = cache.state
            twin.metaState = cache.metaState
            #expect(twin.nbytes == cache.nbytes)
            #expect(same(rows.run(twin, ones(15)), rows.run(cache, ones(15))), "\(name)")
        }
    }

    @Test func trimsUntilTheFirstEviction() throws {
        for (name, packing) in Self.stores {
            let rows = RowStream(tokens: 60)
            let cache = try H2OKVCache([24, 24], packing: packing)
            rows.run(cache, [10] + ones(6))
            #expect(cache.isTrimmable && cache.trim(9) == 9 && cache.offset == 7, "\(name)")
            #expect(try cache.keptPositions()[0] == [Array(0 ..< 7), Array(0 ..< 7)], "\(name)")
            rows.run(cache, ones(17))
            #expect(cache.isTrimmable)
            rows.run(cache, [1])
            #expect(!cache.isTrimmable && cache.trim(1) == 0 && cache.offset == 25, "\(name)")
        }
    }

    @Test func resizingFoldsWhatNoLongerFits() throws {
        for (name, packing) in Self.stores {
            let rows = RowStream(tokens: 90)
            let cache = try H2OKVCache([40, 40], packing: packing)
            rows.run(cache, [50] + ones(10))
            try cache.resize([16, 28])
            #expect(try cache.keptPositions()[0].map(\.count) == [16, 28], "\(name)")
            #expect(try cache.evictedRemainder!.count.asArray(Float.self) == [44, 32], "\(name)")
            rows.run(cache, ones(20))
            #expect(try cache.keptPositions()[0].map(\.count) == [16, 28], "\(name)")
            #expect(try cache.evictedRemainder!.count.asArray(Float.self) == [64, 52], "\(name)")
            #expect(throws: H2OError.self) { try cache.resize([3, 3]) }
        }
    }

    /// Budgets without room for the recent window leave the cache as it was.
    @Test func resizingThatFailsChangesNothing() throws {
        let rows = RowStream(tokens: 60), packing = Self.stores.last!.packing
        let policy = H2OPolicies.Distinct().with { $0.recent = .share(0.1) }
        let cache = try H2OKVCache([24, 24], policy: policy, packing: packing, undo: 3)
        rows.run(cache, [30] + ones(5))
        #expect(throws: H2OError.self) { try cache.resize([9]) }
        #expect(cache.budgets == [24, 24])
        #expect(cache.undoableSteps == 3)
    }

    /// The state of an empty cache takes the place of whatever a cache holds.
    @Test func stateOfAnEmptyCacheEmpties() throws {
        let rows = RowStream(tokens: 60), empty = try H2OKVCache([20, 28])
        let cache = try H2OKVCache([20, 28])
        rows.run(cache, [30] + ones(5))
        cache.state = empty.state
        cache.metaState = empty.metaState
        #expect(try cache.offset == 0 && cache.physicalLength == 0 && cache.keptPositions() == [])
        #expect(same(rows.run(cache, [30] + ones(5)), rows.run(empty, [30] + ones(5))))
    }

    @Test func pressureLowersAllLayersAtTheSameStep() throws {
        let pressure = H2OMemoryPressure(), rows = RowStream(tokens: 90)
        let layers = try (0 ..< 3).map { _ in
            try H2OKVCache(
                [48, 48], policy: H2OPolicies.Distinct.keysOnly, attends: false,
                pressure: pressure)
        }
        for layer in layers { rows.run(layer, [60] + ones(5)) }
        let before = layers[0].nbytes
        rows.run(layers[0], [1])
        try pressure.lower(toFraction: 0.5)
        // The other layers finish the step as it began.
        for layer in layers.dropFirst() { rows.run(layer, [1]) }
        #expect(layers.allSatisfy { $0.budgets == layers[0].budgets && $0.nbytes == before })
        for layer in layers { rows.run(layer, [1]) }
        for layer in layers {
            let full = layer.fullBudgets![0]
            #expect(layer.budgets == [full / 2, full / 2])
            #expect(layer.nbytes < before * 6 / 10)
            #expect(layer.maxSize == full)
            let counts = try layer.keptPositions()[0].map { Float($0.count) }
            let folded = try layer.evictedRemainder!.count.asArray(Float.self)
            #expect(zip(counts, folded).allSatisfy { $0 + $1 == 67 })
        }
    }

    #if canImport(DispatchMemoryPressure)  // where a test can have the system complain
        @Test(.timeLimit(.minutes(1))) func theSystemsComplaintsAreObeyed() async throws {
            let pressure = H2OMemoryPressure(), rows = RowStream(tokens: 120)
            pressure.observeSystem()
            let cache = try H2OKVCache([64, 64], pressure: pressure)
            rows.run(cache, [80] + ones(5))
            for (event, share) in [(DispatchSource.MemoryPressureEvent.warning, 2), (.critical, 4)]
            {
                DispatchSource.simulateMemoryPressure(event)
                // The handler runs on a queue of its own.
                while pressure.fraction > 1 / Double(share) {
                    try await Task.sleep(for: .milliseconds(1))
                }
                rows.run(cache, ones(5))
                #expect(cache.budgets == [64 / share, 64 / share])
                #expect(try cache.keptPositions()[0].map(\.count) == cache.budgets)
                let folded = Float(cache.offset - 64 / share)
                #expect(try cache.evictedRemainder!.count.asArray(Float.self) == [folded, folded])
            }
            // A warning after a critical event gives nothing back.
            DispatchSource.simulateMemoryPressure(.warning)
            try await Task.sleep(for: .milliseconds(20))
            rows.run(cache, ones(2))
            #expect(cache.budgets == [16, 16])
        }
    #endif

    @Test func bytesAreABound() throws {
        for (name, packing) in Self.stores {
            let cache = try plannedCache(.bytes(12_000), packing: packing)
            RowStream(tokens: 200).run(cache, [90] + ones(110))
            #expect(cache.nbytes <= 12_000, "\(name)")
            #expect(cache.nbytes > 9_000, "\(name)")
        }
        let frame = try H2OFrame(of: RowStream(tokens: 9).keys)
        let policy = H2OPolicies.Salient(), packing = Self.stores[1].packing
        let widths = RowWidths(
            key: 32, value: 32, keySize: 4, valueSize: 4, packing: packing, isFramed: true)
        let slots = mostSlots(in: 6_000) {
            widths.narrow.bytes(ofSlots: $0, policy: policy, remembers: true)
        }
        let cache = try H2OKVCache([slots, slots], policy: policy, packing: packing, frame: frame)
        RowStream(tokens: 200).run(cache, [90] + ones(110))
        #expect(11_000 ... 12_000 ~= cache.nbytes)
    }

    /// Bytes that are too few are told as soon as that is known: before a model, with its widths, or
    /// with what the policy needs.
    @Test func bytesThatAreTooFewAreToldInTime() throws {
        func message(_ body: () throws -> Void) -> String {
            do { try body() } catch { return error.localizedDescription }
            return ""
        }
        // 9 slots of 26 bytes: 4 sinks, one to evict, and as many as these are recent.
        let nothing = message {
            _ = try H2OConfiguration(budget: .bytes(233), policy: H2OPolicies.H2O())
        }
        #expect(
            nothing.contains("233 bytes holds nothing") && nothing.contains("at least 234 bytes"))
        _ = try H2OConfiguration(budget: .bytes(234), policy: H2OPolicies.H2O())
        let configured = message { _ = try H2OConfiguration(budget: .bytes(100)) }
        #expect(configured.contains("100 bytes holds nothing"))

        let model = try ModelTests.own()
        func caches(_ bytes: Int, undo: Int = 0) throws -> [any KVCache] {
            try H2OConfiguration(budget: .bytes(bytes), undo: undo).caches(for: model)
        }
        // Two heads of 32 and 32 in each of three layers: the remainders alone are 2328 bytes.
        let none = message { _ = try caches(2000) }
        #expect(none.contains("leave no slot for each of 2 KV heads of 160 bytes"), "\(none)")
        let few = message { _ = try caches(8000) }
        #expect(few.contains("slots cannot hold 4 sink"), "\(few)")
        #expect(try caches(40_000).count == 3)
        // Steps that can be taken back are charged too.
        #expect(throws: H2OError.self) { try caches(40_000, undo: 60) }
    }

    @Test func settingsOutOfRangeAreRefused() throws {
        #expect(throws: H2OError.self) { try H2OKVCache([4, 4]) }
        #expect(throws: H2OError.self) { try H2OKVCache([]) }
        #expect(throws: H2OError.self) {
            try H2OKVCache([20, 30], policy: H2OPolicies.EMALogits.paper)
        }
        #expect(throws: H2OError.self) { try H2OPacking(keyBits: 7) }
        #expect(throws: H2OError.self) { try H2OPacking(recentBits: 8) }
        #expect(throws: H2OError.self) {
            try H2OKVCache([20, 30], policy: H2OPolicies.Streaming(), attends: false)
        }
        #expect(throws: H2OError.policyNeedsAttention(policy: "h2o", model: "a stock model")) {
            try H2OKVCache([64, 64], policy: H2OPolicies.H2O(), attends: false)
        }
    }

    #if os(macOS) || os(Linux)  // where exit tests exist
        /// In a process of its own: the arrays of tests that run beside it would count. `make test`
        /// takes a fifth of the steps.
        @Test func twentyThousandStepsAtFlatMemory() async {
            await #expect(processExitsWith: .success) {
                for attends in [true, false] {
                    try takeSteps(isQuick ? 4_000 : 20_000, attends: attends)
                }
            }
        }
    #endif
}

private func takeSteps(_ count: Int, attends: Bool) throws {
    let cache = try H2OKVCache(
        [64, 64], policy: attends ? H2OPolicies.Distinct() : H2OPolicies.Distinct.keysOnly,
        attends: attends)
    let rows = RowStream(tokens: 16)
    func step() {
        let place = cache.offset % 16 ..< cache.offset % 16 + 1
        let output = h2oAttention(
            queries: rows.queries[0..., 0..., place], keys: rows.keys[0..., 0..., place],
            values: rows.values[0..., 0..., place], cache: cache, scale: 0.18,
            mask: cache.makeMask(n: 1, windowSize: nil, returnArray: false))
        eval(output)
    }
    for _ in 0 ..< 1000 { step() }
    let bytes = cache.nbytes, active = Memory.activeMemory
    for _ in 1000 ..< count { step() }
    precondition(cache.offset == count)
    precondition(cache.nbytes == bytes, "\(cache.nbytes) bytes held, \(bytes) before")
    precondition(
        Memory.activeMemory <= active + 4096, "\(Memory.activeMemory) bytes, \(active) before")
}
