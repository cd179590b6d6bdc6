import Foundation
import MLX
import Testing

@testable import MLXH2O

/// Swift prepares the very launches that Python does (tools/record_launches.py); none is run here.
@Suite struct LaunchTests {
    static let recorded = checkout.appendingPathComponent(
        "swift/Tests/MLXH2OTests/Fixtures/launches.json")

    @Test func launchesAreThoseOfPython() throws {
        let cases = try SettingValue(parsing: String(contentsOf: Self.recorded, encoding: .utf8))
        var merges = 0
        for one in cases.array! {
            let expected = one["launches"]!.array!, call = one["call"]!
            let operands = operands(call)
            #expect(AttentionLaunch.supports(operands))
            let launch = AttentionLaunch(
                operands, architecture: call["architecture"]!.string!)
            var prepared = [launch.first]
            if launch.block != nil {
                merges += 1
                let outputs = launch.first.outputs.map {
                    MLXArray.zeros($0.shape, dtype: $0.dtype)
                }
                prepared.append(launch.second(outputs[0], outputs[1]))
            }
            #expect(prepared.map(described) == expected, "\(call.text)")
        }
        #expect(merges > 10)
    }

    @Test func otherWidthsAreLeftToPlainOps() {
        for (width, queries) in [(48, 1), (640, 1), (64, 9)] {
            let q = MLXArray.zeros([1, 1, queries, width], dtype: .float16)
            let call = AttentionOperands(
                queries: q, keys: .plain(q), values: .plain(q), scale: 1)
            #expect(!AttentionLaunch.supports(call))
        }
    }

    private func operands(_ call: SettingValue) -> AttentionOperands {
        func int(_ name: String) -> Int { call[name]!.int! }
        let dtype = ["float16": DType.float16, "bfloat16": .bfloat16][call["dtype"]!.string!]
        func zeros(_ shape: [Int]) -> MLXArray { MLXArray.zeros(shape, dtype: dtype ?? .float32) }
        func rows(_ shape: [Int], _ bits: Int) -> Rows {
            guard bits > 0 else { return .plain(zeros(shape)) }
            let packing = try! Packing(keyBits: bits, groupSize: 32)
            return packing.rows("keys", packing.fields("keys", .plain(zeros(shape))))
        }
        let (B, L, N) = (int("batch"), int("queries"), int("keys"))
        let masks: [String: Mask] = [
            "none": .none, "causal": .causal,
            "bool": .array(MLXArray.zeros([B, 1, L, N], dtype: .bool)),
            "row": .array(zeros([L, 1])),
        ]
        return AttentionOperands(
            queries: zeros([B, int("query_heads"), L, int("key_width")]),
            keys: rows([B, int("kv_heads"), N, int("key_width")], int("k_bits")),
            values: rows([B, int("kv_heads"), N, int("value_width")], int("v_bits")), scale: 0.125,
            mask: masks[call["mask"]!.string!]!,
            sinks: call["sinks"]!.bool!
                ? MLXArray.zeros([int("query_heads")], dtype: .float32) : nil)
    }

    private func described(_ launch: KernelLaunch) -> SettingValue {
        func digest(_ text: String) -> SettingValue {
            var digest = SHA256Digest()
            digest.update(Data(text.utf8))
            return .string(digest.hexadecimal())
        }
        let template = launch.template.map { name, value -> SettingValue in
            let text =
                (value as? Bool).map { $0 ? "True" : "False" } ?? "\(value)"
            return .array([.string(name), .string(text)])
        }
        let params = launch.inputs["params"]!.asArray(Int32.self).map(String.init)
        let grid = [
            launch.threadgroups.0 * launch.threads, launch.threadgroups.1, launch.threadgroups.2,
        ]
        return .object([
            "name": .string(launch.name),
            "inputs": .array(launch.reads.map { .string($0) }),
            "outputs": .array(launch.outputs.map { .string($0.name) }),
            "shapes": .array(launch.outputs.map { .array($0.shape.map { .int($0) }) }),
            "dtypes": .array(launch.outputs.map { .string("\($0.dtype)") }),
            "template": .array(template),
            "grid": .array(grid.map { .int($0) }),
            "threads": .int(launch.threads),
            "params": digest("[" + params.joined(separator: ", ") + "]"),
            "text": digest(launch.header + "\0" + launch.source),
        ])
    }
}
