import Foundation
import MLX
import Testing

@testable import MLXH2O

private let record = ProcessInfo.processInfo.environment["HOST_GPU_RECORD"]

/// What a cache launches on a GPU from step to step is what Python launches (tools/record_launches.py):
/// names, buffers with shapes and dtypes, template arguments, grids, integers, texts of the kernels.
///
/// But for two things. Where attention alone is wanted the engine makes a `prompt_lse` that nothing reads:
/// MLX computes no such array, and tests/host_gpu runs whatever is made. And one token with a causal mask
/// is a fused step in the engine, and none in Python.
///
/// Over tests/host_gpu, which runs each launch and writes it to HOST_GPU_RECORD (`make test-swift`).
@Suite(.serialized, .enabled(if: record != nil)) struct LaunchTests {
    /// The GPU that tests/host_gpu says there is.
    private static let architecture =
        ProcessInfo.processInfo.environment["HOST_GPU_ARCHITECTURE"] ?? ""
    private static let recorded = checkout.appendingPathComponent(
        "swift/Tests/MLXH2OTests/Fixtures/launches.json")

    @Test func conversationsAreThoseOfPython() throws {
        let cases = try H2OSettingValue(
            parsing: String(contentsOf: Self.recorded, encoding: .utf8)
        ).array!.filter {
            $0["call"]!["kind"]!.string == "conversation"
                && $0["call"]!["architecture"]!.string == Self.architecture
        }
        #expect(!cases.isEmpty, "\(Self.architecture)")
        // Whether kernels write in place is tried once.
        let cache = try H2OKVCache([24, 24])
        RowStream(tokens: 9, width: 64).run(cache, [4] + ones(2))
        #expect(cache.isDecoding)
        _ = Self.taken()
        for one in cases {
            let expected = one["launches"]!.array!.map { $0.string! }, call = one["call"]!
            let actual = try Self.turns(call)
            #expect(actual.count == expected.count, "\(call.text)")
            for (i, (actual, expected)) in zip(actual, expected).enumerated() {
                #expect(actual.matches(expected), "\(i) of \(call.text): \(actual) \(expected)")
            }
        }
    }

    nonisolated(unsafe) private static var read = 0

    /// All launches since the last time, a line each.
    private static func taken() -> [String] {
        let text = (try? String(contentsOfFile: record!, encoding: .utf8)) ?? ""
        let lines = text.split(separator: "\n").map(String.init)
        defer { read = lines.count }
        return Array(lines.dropFirst(read))
    }

    /// The launches of one turn, or one launch of the step that is shown.
    private struct Turn: CustomStringConvertible {
        let lines: [String]
        var isShown = false
        /// One token with a causal mask.
        var isMasked = false

        func matches(_ expected: String) -> Bool {
            if isShown { return lines[0] == expected }
            if isMasked { return true }
            let count = Int(expected.prefix { $0 != ":" }) ?? -1
            return lines.count >= count
                && Self.without(lines.count - count, lines).contains {
                    Self.digest($0) == expected
                }
        }

        /// The lines without so many `prompt_lse` among them, in each way.
        private static func without(_ count: Int, _ lines: [String]) -> [[String]] {
            guard count > 0 else { return [lines] }
            return lines.indices.filter { lines[$0].contains("prompt_lse") }.flatMap { i in
                without(count - 1, Array(lines[(i + 1)...])).map { lines[..<i] + $0 }
            }
        }

        static func digest(_ lines: [String]) -> String {
            "\(lines.count):\(shortDigest(Data(lines.joined(separator: "\n").utf8)))"
        }

        var description: String { isShown ? lines[0] : Self.digest(lines) }
    }

    /// All turns; of the first step that chooses victims each launch.
    private static func turns(_ call: H2OSettingValue) throws -> [Turn] {
        var turns: [Turn] = [], shown = false
        var cache = try cache(call)
        func say(_ length: Int, scale: Float = 0.125, isCausal: Bool = false) {
            func rows(_ heads: Int, _ width: String) -> MLXArray {
                MLXArray.zeros(
                    [call["batch"]!.int!, heads, length, call[width]!.int!], dtype: dtype(call))
            }
            let mask = cache.makeMask(n: length, windowSize: nil, returnArray: false)
            eval(
                cache.attend(
                    queries: rows(4, "key_width"), keys: rows(2, "key_width"),
                    values: rows(2, "value_width"), scale: scale, mask: isCausal ? .causal : mask,
                    sinks: call["sinks"]!.bool! ? MLXArray.zeros([4], dtype: .float32) : nil))
            let lines = taken()
            let chooses = lines.contains {
                $0.contains("PRIORITY=") && !$0.contains("PRIORITY=1")
            }
            if chooses && !shown {
                shown = true
                turns += lines.map { Turn(lines: [$0], isShown: true) }
            } else {
                turns.append(Turn(lines: lines, isMasked: isCausal))
            }
        }
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
        return turns
    }

    private static func cache(_ call: H2OSettingValue) throws -> H2OKVCache {
        let bits = call["bits"]!.int
        return try H2OKVCache(
            call["budgets"]!.array!.map { $0.int! },
            policy: H2OPolicies.make(
                call["policy"]!.string!, settings: call["settings"]!.object!),
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

private func dtype(_ call: H2OSettingValue) -> DType {
    let dtypes = ["float16": DType.float16, "bfloat16": .bfloat16]
    return dtypes[call["dtype"]!.string!] ?? .float32
}

private func shortDigest(_ data: Data) -> String {
    var digest = SHA256Digest()
    digest.update(data)
    return String(digest.hexadecimal().prefix(16))
}
