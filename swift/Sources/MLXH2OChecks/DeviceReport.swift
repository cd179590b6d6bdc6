import Foundation
import MLX
import MLXH2O

/// What this device says of the kernels: whether they are right here, and how long they take.
///
/// For a report of a device that the project has not seen: run the tests `MLXH2ODeviceTests` on it, or
/// the screen of swift/Examples/ChatApp, and attach ``json``. `mlx_h2o doctor` prints the same on a Mac.
public struct DeviceReport: Sendable, Codable {
    /// The median time of one call.
    public struct Timing: Sendable, Codable {
        public let name: String
        public let slots: Int
        public let milliseconds: Double
    }

    public let machine: String
    public let system: String
    /// Whether the default device is a GPU; without one nothing is checked.
    public let isGPU: Bool
    public let variants: [H2OKernels.Verdict]
    public let timings: [Timing]

    /// Checks kernels and takes times: minutes on a phone.
    ///
    /// - Parameters:
    ///   - forms: How many forms of the kernels are checked; nil: all.
    ///   - slots: Of the caches that are timed.
    /// - Throws: What a cache throws for settings that are wrong.
    public init(forms: Int? = nil, slots: [Int] = [1024, 4096, 16384, 32768]) throws {
        (machine, system) = (Self.machine(), ProcessInfo.processInfo.operatingSystemVersionString)
        isGPU = Device.defaultDevice().deviceType == .gpu
        for form in try KernelForm.all().prefix(forms ?? .max) { try form.run() }
        timings = try slots.flatMap { try Self.timings(slots: $0) }
        variants = H2OKernels.verdicts
    }

    /// Whether every variant that was checked is right.
    public var holds: Bool { variants.allSatisfy(\.usable) }

    /// All of it, to be attached to a report.
    public var json: String {
        let encoder = JSONEncoder()
        encoder.outputFormatting = [.prettyPrinted, .sortedKeys]
        return (try? encoder.encode(self)).map { String(decoding: $0, as: UTF8.self) } ?? ""
    }

    // MARK: timings

    private static let (heads, kvHeads, width) = (16, 8, 128)

    /// One query over so many slots: attention with scores, MLX's own attention, and a step of a layer.
    private static func timings(slots: Int) throws -> [Timing] {
        func rows(_ heads: Int, _ tokens: Int) -> MLXArray {
            MLXRandom.normal([1, heads, tokens, width], dtype: .float16)
        }
        let (q, k, v) = (rows(heads, 1), rows(kvHeads, slots), rows(kvHeads, slots))
        eval(q, k, v)
        let scale = 1 / Float(width).squareRoot()
        var all = [
            Timing(
                name: "attention with scores", slots: slots,
                milliseconds: median {
                    if let result = try? scaledDotProductAttentionWithScores(
                        queries: q, keys: k, values: v, scale: scale)
                    {
                        eval(result.output, result.scores)
                    }
                }),
            Timing(
                name: "MLX's attention", slots: slots,
                milliseconds: median {
                    eval(
                        MLXFast.scaledDotProductAttention(
                            queries: q, keys: k, values: v, scale: scale, mask: .none))
                }),
        ]
        for bits in [nil, 8, 4] {
            let cache = try H2OKVCache(
                Array(repeating: slots, count: kvHeads),
                packing: H2OPacking(keyBits: bits, valueBits: bits))
            func step(_ q: MLXArray, _ k: MLXArray, _ v: MLXArray) {
                eval(
                    h2oAttention(
                        queries: q, keys: k, values: v, cache: cache, scale: scale,
                        mask: q.dim(2) > 1 ? .causal : .none))
            }
            for first in stride(from: 0, to: slots, by: 512) {
                let part = first ..< min(first + 512, slots)
                step(rows(heads, part.count), k[0..., 0..., part], v[0..., 0..., part])
            }
            let new = rows(kvHeads, 1)
            let milliseconds = median { step(q, new, new) }
            let name = "a step" + (bits.map { ", \($0) bits" } ?? "")
            all.append(Timing(name: name, slots: slots, milliseconds: milliseconds))
        }
        return all
    }

    /// Of several calls, after some that do not count.
    private static func median(_ call: () -> Void) -> Double {
        for _ in 0 ..< 2 { call() }
        return (0 ..< 5).map { _ in
            let start = DispatchTime.now().uptimeNanoseconds
            call()
            return Double(DispatchTime.now().uptimeNanoseconds - start) * 1e-6
        }.sorted()[2]
    }

    /// As the system calls it ("iPhone17,1").
    private static func machine() -> String {
        var names = utsname()
        uname(&names)
        return withUnsafePointer(to: &names.machine) {
            $0.withMemoryRebound(to: CChar.self, capacity: 1) { String(cString: $0) }
        }
    }
}
