import CMLXH2O
import Foundation
import MLX
import Testing

@testable import MLXH2O

/// A cache that decodes with the kernels keeps what plain MLX ops keep, and answers alike.
///
/// Where there is a GPU: Metal's, or the one of tests/host_gpu, which runs the kernels' text lane by
/// lane (`make test-swift`).
@Suite(.serialized, .enabled(if: Device.defaultDevice().deviceType == .gpu)) struct GPUDecodingTests
{
    /// From below the budget to far beyond it, with every kernel form.
    @Test(
        arguments: [
            ("distinct", [:], [24, 24]),
            ("distinct", ["mass_weight": .double(0), "evict_every": .int(3)], [24, 24]),
            ("distinct", ["unit": .string("layer")], [24, 24]),
            ("distinct", ["value_weighted": .bool(true)], [16, 30]),
            ("h2o", ["age_normalised": .bool(true), "evict_every": .int(4)], [24, 24]),
            ("ema", ["unit": .string("layer")], [24, 24]),
            ("ema-logits", [:], [24, 24]),
            ("tova", [:], [16, 30]),
            ("streaming", [:], [6, 40]),
            ("keydiff", [:], [24, 24]),
            ("salient", [:], [24, 24]),
            ("salient", ["unit": .string("layer"), "evict_every": .int(3)], [24, 24]),
            ("salient", ["value_weight": .double(1.5)], [16, 30]),
        ] as [(String, [String: H2OSettingValue], [Int])])
    func policiesChooseAlike(
        name: String, settings: [String: H2OSettingValue], budgets: [Int]
    ) throws {
        let policy = try H2OPolicies.make(name, settings: settings)
        try comparing("\(name)") { side in
            let cache = try H2OKVCache(budgets, policy: policy)
            side.follow(cache, side.rows(tokens: 46), [12] + ones(34))
        }
    }

    @Test func rowsArePackedAsTheyCome() throws {
        for (name, settings, k, v) in [
            ("distinct", [:], 8, 8), ("h2o", ["value_weighted": H2OSettingValue.bool(true)], 5, 3),
            ("keydiff", [:], 8, 2),
        ] {
            let packing = try H2OPacking(keyBits: k, valueBits: v, groupSize: 32)
            let policy = try H2OPolicies.make(name, settings: settings)
            try comparing("\(name) \(k) \(v)") { side in
                let cache = try H2OKVCache([24, 30], policy: policy, packing: packing)
                side.follow(cache, side.rows(tokens: 52), [12] + ones(40))
                side.note(stored: cache)
            }
        }
    }

    /// Keys in a frame, remainders that saturate each in its way.
    @Test func framesAndSaturations() throws {
        for (policy, frame) in [
            (H2OPolicies.Salient() as any H2OPolicy, true), (H2OPolicies.Distinct(), true),
            (H2OPolicies.KeyDiff(), true), (H2OPolicies.H2O(), false),
        ] {
            let packing = try H2OPacking(keyBits: 6, valueBits: frame ? 6 : 8, groupSize: 32)
            try comparing("\(policy.name)") { side in
                var rows = side.rows(tokens: 52)
                rows.keys = rows.keys * Float(0.5) + Float(3)
                let cache = try H2OKVCache(
                    [24, 30], policy: policy, packing: packing,
                    frame: frame ? H2OFrame(of: rows.keys) : nil, saturation: [0, 2.5])
                side.follow(cache, rows, [12] + ones(40))
                side.note(stored: cache)
            }
        }
    }

    @Test func withoutRemainder() throws {
        for policy in [H2OPolicies.Distinct() as any H2OPolicy, H2OPolicies.H2O()] {
            try comparing("\(policy.name)") { side in
                let cache = try H2OKVCache([24, 24], policy: policy, remainder: false)
                side.follow(cache, side.rows(tokens: 36), [12] + ones(24))
            }
        }
    }

    @Test func attentionSinksAndBatches() throws {
        try comparing("sinks") { side in
            let cache = try H2OKVCache([20, 20])
            let rows = side.rows(tokens: 40, batch: 2)
            side.follow(
                cache, rows, [12] + ones(28), sinks: MLXArray([0.5, -1, 2, 0] as [Float]))
        }
    }

    /// Past the slots that are allocated at first, after a prompt that two passes score.
    @Test func growth() throws {
        try comparing("growth") { side in
            let cache = try H2OKVCache([262, 262])
            side.follow(cache, side.rows(tokens: 265), [250] + ones(15))
        }
    }

    /// Prompts beyond the budget, dense and packed; chunks in the midst of decoding.
    @Test func chunksBetweenSteps() throws {
        for packing in [H2OPacking.dense, try H2OPacking(keyBits: 8, valueBits: 8, groupSize: 32)] {
            try comparing("bits \(packing.keyBits ?? 0)") { side in
                let cache = try H2OKVCache([24, 24], packing: packing)
                side.follow(cache, side.rows(tokens: 92), [40] + ones(6) + [5] + ones(6) + [30, 1])
            }
        }
    }

    /// Reading the rows takes them back, and decoding goes on where it was.
    @Test func readersAndResizing() throws {
        try comparing("readers") { side in
            let rows = side.rows(tokens: 90)
            var cache = try H2OKVCache([24, 24])
            side.follow(cache, rows, [10, 1, 1])
            #expect(cache.trim(2) == 2)
            side.follow(cache, rows, ones(25))
            cache = cache.copy() as! H2OKVCache
            side.follow(cache, rows, ones(5))
            try cache.resize([14, 20])
            side.follow(cache, rows, ones(8))
            let file = FileManager.default.temporaryDirectory
                .appendingPathComponent("\(UUID().uuidString).safetensors")
            defer { try? FileManager.default.removeItem(at: file) }
            try H2OKVCache.saveCaches([cache], to: file)
            cache = try H2OKVCache.loadedCaches(from: file).caches[0] as! H2OKVCache
            side.follow(cache, rows, ones(5))
            let twin = try H2OKVCache([14, 20])
            let names = cache.metaState
            twin.state = cache.state
            twin.metaState = names
            side.follow(twin, rows, ones(5))
        }
    }

    /// The state evaluated with every token, as mlx-swift-lm's main branch does: steps stay fused, and
    /// nothing waits to be computed.
    @Test func stateEvaluatedWithEveryToken() throws {
        for packing in [H2OPacking.dense, try H2OPacking(keyBits: 8, valueBits: 8, groupSize: 32)] {
            try comparing("state \(packing.keyBits ?? 0)") { side in
                let cache = try H2OKVCache([24, 24], packing: packing)
                side.follow(
                    cache, side.rows(tokens: 42), [12] + ones(30), evaluatesState: true)
            }
        }
    }

    /// Slots that are shared out anew in the midst of fused steps.
    @Test func conversationsThatGrow() throws {
        let filling = [(16, [24, 12]), (32, [14, 22])].map { Stage(beyond: $0, budgets: $1) }
        for packing in [H2OPacking.dense, try H2OPacking(keyBits: 8, valueBits: 8, groupSize: 32)] {
            try comparing("filling \(packing.keyBits ?? 0)") { side in
                let settings = CacheSettings(
                    [18, 18], policy: H2OPolicies.Salient(), remainder: true, attends: true,
                    packing: packing, undo: 0, filling: filling)
                let cache = try H2OKVCache(settings, PressureShare(nil, nil))
                side.follow(cache, side.rows(tokens: 52), [12] + ones(40))
                #expect(cache.budgets == [14, 22])
            }
        }
    }

    /// Where steps can be taken back each is in MLX's operations, and its attention in kernels.
    @Test func stepsThatCanBeTakenBackAreNotFused() throws {
        try comparing("undo", fuses: false) { side in
            let rows = side.rows(tokens: 60), cache = try H2OKVCache([20, 28], undo: 4)
            side.follow(cache, rows, [30] + ones(5))
            #expect(cache.trim(4) == 4)
            side.follow(cache, rows, [5, 1, 16])
            #expect(cache.trim(3) == 3)
            side.follow(cache, rows, ones(4))
        }
    }

    @Test func pressureEndsAndGoesOn() throws {
        try comparing("pressure") { side in
            let pressure = H2OMemoryPressure(), rows = side.rows(tokens: 70)
            let cache = try H2OKVCache([32, 32], pressure: pressure)
            side.follow(cache, rows, [40] + ones(5))
            try pressure.lower(toFraction: 0.5)
            side.follow(cache, rows, ones(12))
            #expect(cache.budgets == [16, 16])
        }
    }

    /// Arrays that were given out before, and twins, keep their values.
    @Test func whatIsWrittenInPlaceIsSeenNowhereElse() throws {
        let rows = Side(isPlain: false).rows(tokens: 60), cache = try H2OKVCache([24, 24])
        rows.run(cache, [12] + ones(30))
        #expect(cache.isDecoding)
        let seen = cache.state, twin = cache.copy() as! H2OKVCache
        func numbers() -> [[Float]] {
            (seen + twin.namedArrays.map(\.array)).map { $0.float32.asArray(Float.self) }
        }
        let before = numbers()
        rows.run(cache, ones(5))
        #expect(cache.isDecoding)
        #expect(numbers() == before)
    }

    /// Half precision, by a policy whose choices do not hang on it.
    @Test func narrowRows() throws {
        for (dtype, tolerance) in [(DType.float16, Float(4e-3)), (.bfloat16, 3e-2)] {
            try comparing("\(dtype)", within: tolerance) { side in
                let cache = try H2OKVCache([24, 24], policy: H2OPolicies.Streaming())
                side.follow(cache, side.rows(tokens: 42, dtype: dtype), [12] + ones(30))
            }
        }
    }

    /// Plain operations go on where the kernels were.
    @Test func plainOperationsTakeOver() throws {
        try comparing("device") { side in
            let rows = side.rows(tokens: 50), cache = try H2OKVCache([24, 24])
            side.follow(cache, rows, [12] + ones(20))
            cache.usesKernels = false
            side.note(rows.run(cache, ones(8)), cache)
            #expect(!cache.isDecoding)
        }
    }

    /// A golden conversation: what Python's CPU kept, exactly. (The others take many minutes.)
    @Test func goldenTrajectory() throws {
        let golden = try Golden.shipped.get()
        let one = try #require(
            golden.cases.first { $0.group == "trajectory" && $0.name == "distinct-ragged-k8v4" })
        let actual = try GoldenReplay.run(one, golden.of(one, "in"))
        let differences = golden.differences(actual, one)
        #expect(differences.isEmpty, "\(differences.joined(separator: "; "))")
    }

    /// Attention by itself, over one long cache.
    @Test func attentionWithScores() throws {
        let rows = RowStream(tokens: 1300, width: 64)
        func attended() throws -> [MLXArray] {
            let actual = try scaledDotProductAttentionWithScores(
                queries: rows.queries[0..., 0..., 0 ..< 1], keys: rows.keys, values: rows.values,
                scale: 0.18)
            return [actual.output, actual.scores, actual.logSumExp]
        }
        let kernels = try attended()
        mlx_h2o_use_kernels(false)
        defer { mlx_h2o_use_kernels(true) }
        for (actual, expected) in zip(kernels, try attended()) {
            #expect(abs(actual - expected).max().item(Float.self) < 1e-4)
        }
    }

    /// Another cache's state takes the place of rows that kernels have.
    @Test func stateIsSetInTheMidstOfFusedDecoding() throws {
        let rows = Side(isPlain: false).rows(tokens: 60)
        let saved = try H2OKVCache([24, 24]), cache = try H2OKVCache([24, 24])
        rows.run(saved, [5])
        rows.run(cache, [12] + ones(3))
        #expect(cache.isDecoding)
        cache.state = saved.state
        cache.metaState = saved.metaState
        #expect(!cache.isDecoding)
        #expect(try cache.offset == 5 && cache.keptPositions() == saved.keptPositions())
        #expect(same(rows.run(cache, ones(9)), rows.run(saved, ones(9))))
    }

    /// The names tell of all rows, and the state that is read after them is these.
    @Test func metaStateAndStateGoTogetherInTheMidstOfFusedDecoding() throws {
        let rows = Side(isPlain: false).rows(tokens: 60), cache = try H2OKVCache([24, 24])
        rows.run(cache, [12] + ones(5))
        #expect(!cache.state.isEmpty && cache.isDecoding)
        let names = cache.metaState
        #expect(names.contains("slots.keys") && cache.state.count == names.count - 1)
        rows.run(cache, [1])
        #expect(cache.isDecoding && cache.state.count < names.count - 1)
    }

    // On a device exponentials are approximate.
    #if os(Linux)
        private static let tolerance: Float = 1e-5
    #else
        private static let tolerance: Float = 1e-4
    #endif

    /// Run the same by the kernels and by plain ops.
    private func comparing(
        _ label: String, within tolerance: Float = Self.tolerance, fuses: Bool = true,
        _ body: (Side) throws -> Void
    ) throws {
        let kernels = Side(isPlain: false), plain = Side(isPlain: true)
        try body(kernels)
        try body(plain)
        #expect((kernels.fused > 0) == fuses && plain.fused == 0, "\(label)")
        #expect(kernels.kept == plain.kept, "\(label)")
        #if os(Linux)  // MLX's own GPU kernels round ties the other way
            #expect(kernels.words == plain.words, "\(label)")
        #endif
        #expect(kernels.numbers.count == plain.numbers.count)
        for (i, (actual, expected)) in zip(kernels.numbers, plain.numbers).enumerated() {
            #expect(actual.shape == expected.shape)
            let apart = abs(actual.float32 - expected.float32)
            let relative = (apart / maximum(abs(expected.float32), Float(1))).max()
            #expect(relative.item(Float.self) < tolerance, "\(label), number \(i)")
        }
    }
}

/// What one of the two sides came to.
private final class Side {
    private let isPlain: Bool
    private(set) var kept: [[[[Int]]]] = []
    private(set) var numbers: [MLXArray] = []
    private(set) var words: [[UInt32]] = []
    /// Decode steps that kernels took.
    private(set) var fused = 0

    init(isPlain: Bool) { self.isPlain = isPlain }

    /// The sizes of tests/metal/test_gpu_decoding.py, for which kernels are built there.
    func rows(tokens: Int, batch: Int = 1, dtype: DType = .float32) -> RowStream {
        RowStream(batch: batch, tokens: tokens, width: 64, valueWidth: 32, dtype: dtype)
    }

    /// Take tokens in, and note the outputs and what is held in the end.
    func follow(
        _ cache: H2OKVCache, _ rows: RowStream, _ chunks: [Int], sinks: MLXArray? = nil,
        evaluatesState: Bool = false
    ) {
        cache.usesKernels = !isPlain
        var outputs: [MLXArray] = []
        for length in chunks {
            outputs.append(rows.run(cache, [length], sinks: sinks))
            if evaluatesState { eval(cache.state) }
            if cache.isDecoding { fused += 1 }
            #expect(cache.isDecoding == (length == 1 && !isPlain && cache.undo == 0))
        }
        note(joined(outputs, axis: 2), cache)
    }

    func note(_ outputs: MLXArray, _ cache: H2OKVCache) {
        kept.append(try! cache.keptPositions())
        numbers.append(outputs)
        numbers.append(contentsOf: try! cache.evictedRemainder?.arrays ?? [])
        numbers.append(contentsOf: cache.stored("value_lengths"))
        numbers.append(contentsOf: try! cache.keptScores().flatMap { $0.map { MLXArray($0) } })
    }

    /// Packed rows, in order of position: the very bits.
    func note(stored cache: H2OKVCache) {
        for name in ["keys", "values"] {
            words.append(contentsOf: cache.stored(name).map { $0.asArray(UInt32.self) })
        }
    }
}
