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
}
