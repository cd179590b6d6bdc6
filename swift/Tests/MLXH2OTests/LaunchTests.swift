import Foundation
import MLX
import Testing

@testable import MLXH2O

/// Swift prepares the very launches that Python does (tools/record_launches.py); none is run here.
@Suite struct LaunchTests {
    static let recorded = checkout.appendingPathComponent(
        "swift/Tests/MLXH2OTests/Fixtures/launches.json")

    @Test(arguments: ["attention", "step", "prompt", "conversation", "probe"])
    func launchesAreThoseOfPython(kind: String) throws {
        let cases = try SettingValue(parsing: String(contentsOf: Self.recorded, encoding: .utf8))
        let ofKind = cases.array!.filter { $0["call"]!["kind"]!.string == kind }
        #expect(!ofKind.isEmpty)
        for one in ofKind {
            let expected = one["launches"]!.array!.map { $0.string! }, call = one["call"]!
            let found = try launches(call)
            #expect(found.count == expected.count, "\(call.text)")
            for (i, (found, expected)) in zip(found, expected).enumerated() {
                #expect(found == expected, "\(i) of \(call.text)")
            }
        }
    }

    @Test func otherWidthsAreLeftToPlainOps() {
        for (width, queries) in [(48, 1), (640, 1), (64, 9)] {
            let q = MLXArray.zeros([1, 1, queries, width], dtype: .float16)
            let call = AttentionCall(
                queries: q, keys: .plain(q), values: .plain(q), scale: 1)
            #expect(!AttentionLaunch.supports(call))
        }
    }

    /// Where kernels cannot write in place the fused step is not used.
    @Test func withoutWritingInPlaceNothingIsFused() throws {
        let settings = try CacheSettings(
            .tokens(64), policy: Policies.H2O(), remainder: true, attends: true, packing: .dense,
            undo: 0)
        let row = MLXArray.zeros([1, 1, 1, 64], dtype: .float16)
        let token = NewTokens(
            queries: row, keys: row, values: row, scale: 1, mask: .none, sinks: nil)
        for writes in [false, true] {
            let metal = MetalKernels(architecture: "applegpu_g13g", writesInPlace: writes)
            Backend.$chosen.withValue(.metal(metal)) {
                #expect((GPUDecoder.kernels(for: token, settings) != nil) == writes)
            }
        }
    }

    /// A cache whose rows are read after every step goes on in plain ops, until the next prompt.
    @Test func readersOfEveryStepEndFusedDecoding() throws {
        let cache = try H2OKVCache(.heads([24, 24])), rows = RowStream(tokens: 60, width: 64)
        var fused: [Bool] = []
        func step() {
            rows.run(cache, [1])
            fused.append(cache.isDecoding)
        }
        _ = LaunchRecord.of { _ in
            let metal = MetalKernels(architecture: "applegpu_g13g", writesInPlace: true)
            Backend.$chosen.withValue(.metal(metal)) {
                rows.run(cache, [12])
                for _ in 0 ..< 5 {
                    step()
                    _ = cache.namedArrays
                }
                rows.run(cache, [3])
                step()
            }
        }
        #expect(fused == [true, true, true, false, false, true])
    }

    /// What a token iterator evaluates after every step leaves the rows with the kernels.
    @Test func stateOfEveryStepIsReadInTheMidstOfFusedDecoding() throws {
        let cache = try H2OKVCache(.heads([24, 24])), rows = RowStream(tokens: 60, width: 64)
        _ = LaunchRecord.of { _ in
            let metal = MetalKernels(architecture: "applegpu_g13g", writesInPlace: true)
            Backend.$chosen.withValue(.metal(metal)) {
                rows.run(cache, [12])
                for _ in 0 ..< 5 {
                    rows.run(cache, [1])
                    #expect(!cache.state.isEmpty && cache.isDecoding)
                }
            }
        }
        // The names tell of the rows, which are here again.
        let names = cache.metaState
        #expect(!cache.isDecoding && names.contains("slots.keys"))
        #expect(cache.state.count == names.count - 1)
    }

    /// Another cache's state takes the place of rows that kernels have.
    @Test func stateIsSetInTheMidstOfFusedDecoding() throws {
        let rows = RowStream(tokens: 60, width: 64), saved = try H2OKVCache(.heads([24, 24]))
        rows.run(saved, [5])
        let cache = try H2OKVCache(.heads([24, 24]))
        _ = LaunchRecord.of { _ in
            let metal = MetalKernels(architecture: "applegpu_g13g", writesInPlace: true)
            Backend.$chosen.withValue(.metal(metal)) {
                rows.run(cache, [12] + ones(3))
                #expect(cache.isDecoding)
                cache.state = saved.state
                cache.metaState = saved.metaState
                #expect(!cache.isDecoding)
            }
        }
        #expect(cache.offset == 5 && cache.keptPositions() == saved.keptPositions())
        #expect(same(rows.run(cache, ones(9)), rows.run(saved, ones(9))))
    }

    private func launches(_ call: SettingValue) throws -> [String] {
        switch call["kind"]!.string! {
        case "attention", "step": ofAttention(call)
        case "prompt": ofPrompt(call)
        case "conversation": try ofConversation(call)
        default: LaunchRecord.of { _ in #expect(!GPUDecoder.triesToWriteInPlace()) }
        }
    }

    private func ofAttention(_ call: SettingValue) -> [String] {
        let x = Operands(call), export = call["export"]?.int.flatMap(AttentionLaunch.Export.init)
        return LaunchRecord.of { _ in
            #expect(x.ranges != nil || AttentionLaunch.supports(x.operands))
            _ = AttentionLaunch(
                x.operands, remainder: call["remainder"]?.bool == true ? x.remainder : nil,
                saturation: call["saturation"] == .null
                    ? nil : call.numbers("saturation").map { MLXArray($0) },
                frameScale: call["framed"]?.bool == true ? x.frameScale : nil,
                means: call["means"]?.bool == true ? x.means : nil, ranges: x.ranges,
                export: export ?? .logits, architecture: call["architecture"]!.string!,
                after: x.ranges == nil ? nil : MLXArray.zeros([1, 1], dtype: .int32)
            ).run()
        }
    }

    private func ofPrompt(_ call: SettingValue) -> [String] {
        let x = Operands(call)
        var operands = x.operands
        return LaunchRecord.of { record in
            if let ranges = x.ranges {
                let prompt = PromptLaunch(operands, ranges: ranges)
                _ = prompt.mass(prompt.logSumExp())
                return
            }
            let backend = Backend.metal(MetalKernels(architecture: call["architecture"]!.string!))
            if call["remainder"]!.bool! {
                let column = x.remainder.column(queries: operands.queries, scale: 0.125)
                operands.seed = (column, x.remainder.meanValue)
            }
            _ = backend.attention(operands)
            record.note("")
            _ = backend.attentionWithScores(operands)
            record.note("")
            _ = backend.attentionWithMass(operands)
            record.note("")
        }
    }

    /// Per turn the digest of its launches; all of them of the first step that chooses victims.
    private func ofConversation(_ call: SettingValue) throws -> [String] {
        var turns: [String] = [], shown = false
        let metal = MetalKernels(
            architecture: call["architecture"]!.string!, writesInPlace: true)
        _ = try LaunchRecord.of { record in
            var cache = try cache(call)
            func say(_ length: Int, scale: Float = 0.125, isCausal: Bool = false) {
                func rows(_ heads: Int, _ width: String) -> MLXArray {
                    MLXArray.zeros(
                        [call["batch"]!.int!, heads, length, call[width]!.int!],
                        dtype: dtype(call))
                }
                let mask = cache.makeMask(n: length, windowSize: nil, returnArray: false)
                eval(
                    cache.attend(
                        queries: rows(4, "key_width"), keys: rows(2, "key_width"),
                        values: rows(2, "value_width"), scale: scale,
                        mask: isCausal ? .causal : mask,
                        sinks: call["sinks"]!.bool!
                            ? MLXArray.zeros([4], dtype: .float32) : nil))
                let lines = record.taken()
                let chooses = lines.contains {
                    $0.contains("PRIORITY=") && !$0.contains("PRIORITY=1")
                }
                if chooses && !shown {
                    shown = true
                    turns += lines
                } else {
                    let text = Data(lines.joined(separator: "\n").utf8)
                    turns.append("\(lines.count):\(shortDigest(text))")
                }
            }
            try Backend.$chosen.withValue(.metal(metal)) {
                for turn in call["turns"]!.array! {
                    switch turn.string {
                    case "look": _ = cache.namedArrays
                    case "trim": cache.trim(2)
                    case "resize": try cache.resize([14, 20])
                    case "masked": say(1, isCausal: true)
                    case "rescaled": say(1, scale: 0.25)
                    case "copy": cache = cache.copy() as! H2OKVCache
                    case "save":
                        let arrays = Dictionary(
                            uniqueKeysWithValues: cache.namedArrays.map { ($0.name, $0.array) })
                        cache = try H2OKVCache.restored(arrays, cache.configuration)
                    default:
                        let steps = turn.array?.map { $0.int! } ?? [1, turn.int!]
                        for _ in 0 ..< steps[0] { say(steps[1]) }
                    }
                }
            }
        }
        return turns
    }

    private func cache(_ call: SettingValue) throws -> H2OKVCache {
        let bits = call["bits"]!.int
        return try H2OKVCache(
            .heads(call["budgets"]!.array!.map { $0.int! }),
            policy: Policies.make(call["policy"]!.string!, settings: call["settings"]!.object!),
            remainder: call["remainder"]!.bool!,
            packing: H2OPacking(
                keyBits: call["k_bits"]!.int ?? bits, valueBits: call["v_bits"]!.int ?? bits,
                groupSize: 32, recentBits: call["recent_bits"]!.int),
            frame: call["framed"]!.bool! ? unitFrame(width: call["key_width"]!.int!) : nil,
            saturation: call.numbers("saturation")!)
    }
}

/// One that changes nothing, of two KV heads.
private func unitFrame(width: Int) throws -> H2OFrame {
    func rows(_ number: Float) -> [[Float]] {
        Array(repeating: Array(repeating: number, count: width), count: 2)
    }
    return try H2OFrame(centre: rows(0), scale: rows(1))
}

/// Zeros of a call's sizes.
private struct Operands {
    /// Flat keys and values where the call is ragged.
    let operands: AttentionCall
    /// Where the heads' slots lie then.
    let ranges: Ranges?
    /// Of all heads.
    let remainder: Remainder
    /// A mean key for each of them.
    let means: MLXArray
    let frameScale: MLXArray

    init(_ call: SettingValue) {
        func int(_ name: String) -> Int { call[name]!.int! }
        func zeros(_ shape: [Int]) -> MLXArray { MLXArray.zeros(shape, dtype: dtype(call)) }
        let (B, Hq, Hk) = (int("batch"), int("query_heads"), int("kv_heads"))
        let (L, N, D) = (int("queries"), int("keys"), int("key_width"))
        var slots = [Hk, N], ranges: Ranges?
        if call["ragged"]?.bool == true {
            let lengths = (0 ..< Hk).map { max(N / (1 + $0 % 3), L) }
            // A range may be larger than what is attended to.
            var starts = [0]
            for length in lengths { starts.append(starts.last! + length + 4) }
            slots = [starts.removeLast()]
            ranges = Ranges(starts: starts, lengths: lengths)
        }
        func rows(_ width: String, _ bits: String) -> Rows {
            let rows = Rows.plain(zeros([B] + slots + [int(width)]))
            guard int(bits) > 0 else { return rows }
            let packing = try! H2OPacking(keyBits: int(bits), groupSize: 32)
            return packing.rows("keys", packing.fields("keys", rows))
        }
        let masks: [String: Mask] = [
            "none": .none, "causal": .causal,
            "bool": .array(MLXArray.zeros([B, 1, L, N], dtype: .bool)),
            "row": .array(zeros([L, 1])),
        ]
        operands = AttentionCall(
            queries: zeros([B, Hq, L, D]), keys: rows("key_width", "k_bits"),
            values: rows("value_width", "v_bits"), scale: 0.125,
            mask: masks[call["mask"]!.string!]!,
            sinks: call["sinks"]!.bool! ? MLXArray.zeros([Hq], dtype: .float32) : nil)
        self.ranges = ranges
        remainder = Remainder(
            batch: B, heads: Hk, keyWidth: D, valueWidth: int("value_width"))
        means = MLXArray.zeros([B, Hk, D], dtype: .float32)
        frameScale = MLXArray.ones([Hk, D], dtype: .float32)
    }
}

private func dtype(_ call: SettingValue) -> DType {
    let dtypes = ["float16": DType.float16, "bfloat16": .bfloat16]
    return dtypes[call["dtype"]!.string!] ?? .float32
}
