import Foundation
import MLX
import Testing

@testable import MLXH2O

/// The C++ engine beside this package's own, in one process: the same positions and bytes, and outputs,
/// scores and remainder within rounding.
///
/// With undo bytes are not compared: they differ by some arrays, for a reason that is not settled yet.
@Suite(.serialized) struct EngineTests {
    private static let nearest: Float = 2e-5
    /// `make test` runs each seventh case.
    private static let step = max(
        1, Int(ProcessInfo.processInfo.environment["MLX_H2O_STEP"] ?? "") ?? 1)

    private func policies() throws -> [any Policy] {
        let named = try Policies.names.map { name in
            let recent: [String: SettingValue] = name == "paper" ? ["recent": .int(8)] : [:]
            return try Policies.make(name, settings: recent)
        }
        // Other tests register policies of their own meanwhile.
        let known = named.filter(EnginePolicy.isKnown)
        #expect(known.count >= 8)
        return known + [
            Policies.H2O().with { ($0.evictEvery, $0.prompt) = (3, .full) },
            Policies.EMA().with { ($0.valueWeighted, $0.ageNormalised) = (true, true) },
            Policies.Distinct.keysOnly,
        ]
    }

    /// A cache of each engine.
    private struct Pair {
        let cache: H2OKVCache
        let engine: Engine

        init(cache: H2OKVCache, engine: Engine) { (self.cache, self.engine) = (cache, engine) }

        init(_ settings: CacheSettings) throws {
            guard case .heads(let budgets) = settings.size else { throw H2OError.partial("heads") }
            cache = H2OKVCache(settings, PressureShare(nil, nil))
            engine = try Engine(settings, budgets: budgets)
        }

        /// The greatest difference of outputs over chunks of so many tokens.
        func run(_ rows: RowStream, _ chunks: [Int], sinks: MLXArray? = nil) throws -> Float {
            var worst: Float = 0
            for length in chunks {
                let range = engine.offset ..< engine.offset + length
                let found = try engine.attend(
                    queries: rows.queries[0..., 0..., range], keys: rows.keys[0..., 0..., range],
                    values: rows.values[0..., 0..., range], scale: 0.18, sinks: sinks)
                let expected = rows.run(cache, [length], sinks: sinks)
                #expect(found.shape == expected.shape && found.dtype == expected.dtype)
                let apart = abs(found.float32 - expected.float32).max()
                worst = max(worst, apart.item(Float.self))
            }
            return worst
        }
    }

    /// The same tokens, bytes and counts, and numbers as near as can be asked.
    private func expectAlike(
        _ pair: Pair, remembers: Bool = true, _ label: String,
        _ location: SourceLocation = #_sourceLocation
    ) throws {
        let (cache, engine) = (pair.cache, pair.engine), comment = Comment(rawValue: label)
        func expect(_ holds: Bool, _ what: String) {
            #expect(holds, "\(comment): \(what)", sourceLocation: location)
        }
        expect(engine.offset == cache.offset, "offset")
        expect(engine.physicalLength == cache.physicalLength, "length")
        expect(engine.evicted == cache.evicted, "evicted")
        expect(engine.undoableSteps == cache.undoableSteps, "undoable")
        if cache.undo == 0 {
            expect(engine.nbytes == cache.nbytes, "bytes: \(engine.nbytes), not \(cache.nbytes)")
        }
        expect(try engine.keptPositions() == cache.keptPositions(), "positions")
        let scores = zip(
            try engine.keptScores().joined().joined(), cache.keptScores().joined().joined())
        let apart = scores.map { abs($0 - $1) / max(1, abs($1)) }.max() ?? 0
        expect(apart < Self.nearest, "scores, by \(apart)")
        guard remembers else { return }
        for (found, expected) in zip(try engine.remainder(), cache.evictedRemainder!.arrays) {
            expect(allClose(found, expected, rtol: 1e-4, atol: 1e-4).item(Bool.self), "remainder")
        }
    }

    /// Every policy and store, with a frame where keys are packed, budgets of each head's own where the
    /// policy allows, and steps to take back.
    @Test(arguments: CacheTests.stores.map(\.name), [0, 4])
    func everyPolicy(store: String, undo: Int) throws {
        let packing = CacheTests.stores.first { $0.name == store }!.packing
        let rows = RowStream(batch: 2, tokens: 90)
        var number = store.count + undo
        for policy in try policies() {
            if packing.recent != nil && policy.recentSlots(20) == 0 { continue }
            for frame in [nil, try H2OFrame(of: rows.keys[0..., 0..., 0 ..< 40])] {
                if frame != nil && packing.keyBits == nil { continue }
                for remainder in [true, false] {
                    number += 1
                    guard number % Self.step == 0 else { continue }
                    let budgets = policy.options.unit == .layer ? [24, 24] : [20, 28]
                    let settings = try CacheSettings(
                        .heads(budgets), policy: policy, remainder: remainder, attends: true,
                        packing: packing, undo: undo, frame: frame, saturation: [4, 0])
                    let pair = try Pair(settings), remembers = settings.remembers
                    let label = "\(type(of: policy).name) \(policy.settings) \(frame != nil)"
                    for chunks in [[13], ones(9), [30, 3] + ones(8)] {
                        let worst = try pair.run(rows, chunks)
                        #expect(worst < Self.nearest, "\(label) \(worst)")
                        try expectAlike(pair, remembers: remembers, label)
                    }
                }
            }
        }
    }

    private static let fewRecent = Policies.Distinct().with {
        ($0.sink, $0.recent) = (2, .count(3))
    }

    private func settings(
        _ packing: H2OPacking, undo: Int = 0, filling: [Stage] = [], budgets: [Int] = [20, 28]
    ) throws -> CacheSettings {
        try CacheSettings(
            .heads(budgets), policy: Self.fewRecent, remainder: true, attends: true,
            packing: packing, undo: undo, saturation: [4, 0], filling: filling)
    }

    /// Steps and parts of a chunk are taken back alike, and what follows is alike.
    @Test(arguments: CacheTests.stores.map(\.name)) func takingBack(store: String) throws {
        let packing = CacheTests.stores.first { $0.name == store }!.packing
        let pair = try Pair(settings(packing, undo: 5)), rows = RowStream(batch: 2, tokens: 90)
        for (chunks, n) in [([12] + ones(3), 3), ([20] + ones(6), 5), ([4], 2), ([16], 4)] {
            #expect(try pair.run(rows, chunks) < Self.nearest)
            try expectAlike(pair, "before \(n)")
            #expect(pair.cache.trim(n) == n)
            try pair.engine.undoSteps(n)
            try expectAlike(pair, "after \(n)")
        }
        #expect(throws: H2OError.self) { try pair.engine.undoSteps(30) }
        #expect(try pair.run(rows, ones(5)) < Self.nearest)
        try expectAlike(pair, "on")
    }

    /// Slots that follow, pins, other slots, turns, copies and attention sinks.
    @Test(arguments: CacheTests.stores.map(\.name)) func betweenSteps(store: String) throws {
        let packing = CacheTests.stores.first { $0.name == store }!.packing
        let filling = [
            Stage(beyond: 24, budgets: [32, 16]), Stage(beyond: 60, budgets: [18, 30]),
        ]
        let pair = try Pair(settings(packing, filling: filling, budgets: [24, 24]))
        let rows = RowStream(batch: 2, tokens: 160)
        let sinks = MLXArray([0.5, -1, 2, 0] as [Float])
        func run(_ chunks: [Int], _ label: String) throws {
            #expect(try pair.run(rows, chunks, sinks: sinks) < Self.nearest, "\(label)")
            try expectAlike(pair, label)
            #expect(pair.engine.plan == pair.cache.core.layer!.plan, "\(label)")
            #expect(pair.engine.pins == pair.cache.pins, "\(label)")
        }
        try run([20] + ones(6), "filling")
        let answer = try pair.cache.pin([0 ..< 7, 40 ..< 43])
        try pair.engine.pin([0 ..< 7, 40 ..< 43])
        let missing = (answer.partly + answer.gone).flatMap { Array($0) }.sorted()
        #expect(pair.engine.missing.flatMap { Array($0) } == missing)
        try run([20] + ones(20), "pins")
        try pair.cache.newTurn(carry: 0.5)
        try pair.engine.newTurn(carry: 0.5)
        try run(ones(6), "turn")
        let twin = try pair.engine.copied()
        try pair.cache.resize([17, 22])
        try pair.engine.resize(SlotPlan(budgets: [17, 22]))
        try run(ones(6) + [12], "resize")
        #expect(twin.plan.budgets == [18, 30] && twin.offset == pair.engine.offset - 18)
        #expect(throws: H2OError.self) { try pair.engine.resize(SlotPlan(budgets: [5, 22])) }
        try pair.cache.unpin()
        try pair.engine.unpin()
        try run(ones(9), "unpinned")
    }

    /// What one saves the other goes on with, and both save the same.
    @Test(arguments: CacheTests.stores.map(\.name)) func saving(store: String) throws {
        let packing = CacheTests.stores.first { $0.name == store }!.packing
        let pair = try Pair(settings(packing)), rows = RowStream(batch: 2, tokens: 90)
        #expect(try pair.run(rows, [30] + ones(9)) < Self.nearest)
        let saved = try pair.engine.saved(), arrays = pair.cache.namedArrays
        #expect(saved.arrays.keys.sorted() == arrays.map(\.name))
        for (name, array) in arrays {
            let found = saved.arrays[name]!
            #expect(found.shape == array.shape && found.dtype == array.dtype, "\(name)")
        }
        let settings = try SettingValue(parsing: saved.settings)
        for (name, value) in pair.cache.configuration.object! where name != "saturation" {
            #expect(settings[name] == value, "\(name)")
        }
        let twin = try H2OKVCache.restored(saved.arrays, pair.cache.configuration)
        let own = Engine.Saved(
            arrays: Dictionary(arrays.map { ($0.name, $0.array) }) { $1 },
            settings: pair.cache.configuration.text)
        let other = Pair(cache: twin, engine: try Engine(own, policy: Self.fewRecent))
        #expect(try other.run(rows, ones(20) + [9]) < Self.nearest)
        try expectAlike(other, "restored")
        var damaged = own.arrays
        damaged["slots.positions"] = nil
        #expect(throws: H2OError.self) {
            try Engine(
                Engine.Saved(arrays: damaged, settings: own.settings), policy: Self.fewRecent)
        }
    }

    /// Rows of 16 bits, by policies whose choices do not hang on rounding.
    @Test(arguments: [DType.float16, .bfloat16]) func narrowRows(dtype: DType) throws {
        for policy in [Policies.Streaming() as any Policy, Policies.H2O()] {
            let pair = try Pair(
                CacheSettings(
                    .heads([20, 28]), policy: policy, remainder: true, attends: true,
                    packing: .dense, undo: 0))
            let worst = try pair.run(RowStream(tokens: 60, dtype: dtype), [30] + ones(20))
            #expect(worst < 0.02, "\(worst)")
            #expect(try pair.engine.keptPositions() == pair.cache.keptPositions())
        }
    }

    /// Rows handed out, and the mask asked for before and with them.
    @Test(arguments: [true, false]) func handingOut(remainder: Bool) throws {
        let pair = try Pair(
            CacheSettings(
                .heads([32, 32]), policy: Policies.KeyDiff(), remainder: remainder, attends: false,
                packing: .dense, undo: 0))
        let rows = RowStream(tokens: 120)
        for length in [20] + ones(20) + [30, 1, 1] {
            let range = pair.cache.offset ..< pair.cache.offset + length
            let (keys, values) = (rows.keys[0..., 0..., range], rows.values[0..., 0..., range])
            let asked = try pair.engine.makeMask(n: length, asArray: false).mask
            let mask = pair.cache.makeMask(n: length, windowSize: nil, returnArray: false).mask
            let found = try pair.engine.update(keys: keys, values: values)
            let expected = pair.cache.update(keys: keys, values: values)
            #expect((asked == nil) == (mask == nil) && (found.mask == nil) == (mask == nil))
            if let mask {
                #expect(allClose(asked!, mask).item(Bool.self) && same(asked!, found.mask!))
            }
            for (a, b) in [(found.keys, expected.0), (found.values, expected.1)] {
                #expect(a.shape == b.shape && allClose(a, b, atol: 1e-4).item(Bool.self))
            }
        }
        #expect(try pair.engine.keptPositions() == pair.cache.keptPositions())
    }
}
