import Foundation
import MLX

@testable import MLXH2O

/// Writes launches down instead of running them; kernels write zeros.
final class LaunchRecord: KernelRunner, @unchecked Sendable {
    private(set) var lines: [String] = []
    private var textDigests: [String: String] = [:]

    /// What is launched meanwhile.
    static func of(_ body: (LaunchRecord) throws -> Void) rethrows -> [String] {
        let record = LaunchRecord()
        try KernelLaunch.$runner.withValue(record) { try body(record) }
        return record.lines
    }

    /// All lines since the last time.
    func taken() -> [String] {
        defer { lines = [] }
        return lines
    }

    func note(_ line: String) { lines.append(line) }

    func run(_ launch: KernelLaunch) -> [MLXArray] {
        // A name stands for one text.
        let digest =
            textDigests[launch.name]
            ?? shortDigest(Data("\(launch.header)\0\(launch.source)".utf8))
        textDigests[launch.name] = digest
        lines.append(described(launch, text: digest))
        return launch.outputs.map { MLXArray.zeros($0.shape, dtype: $0.dtype) }
    }
}

/// Inputs that the host makes of sizes and settings: their contents are recorded too.
private let made = ["params", "plan", "factors", "weights", "saturation"]

/// A launch as a line of text, as tools/record_launches.py writes it.
private func described(_ launch: KernelLaunch, text: String) -> String {
    func buffer(_ name: String, _ shape: [Int], _ dtype: DType) -> String {
        "\(name):\(dtype):\(shape.map(String.init).joined(separator: "x"))"
    }
    func plain(_ value: any KernelTemplateArg) -> String {
        (value as? Bool).map { $0 ? "True" : "False" } ?? "\(value)"
    }
    let inputs = launch.reads.map { (name: $0, array: launch.inputs[$0]!) }
    let groups = launch.threadgroups
    var words = [launch.name]
    words += inputs.map { buffer($0.name, $0.array.shape, $0.array.dtype) } + ["->"]
    words += launch.outputs.map { buffer($0.name, $0.shape, $0.dtype) }
    words += launch.template.map { "\($0)=\(plain($1))" }
    words.append("\(groups.0 * launch.threads)x\(groups.1)x\(groups.2)/\(launch.threads)")
    words += made.compactMap { name in
        launch.inputs[name].map { "\(name):\(shortDigest(bytes(of: $0)))" }
    }
    words.append("text:" + text)
    return words.joined(separator: " ")
}

private func bytes(of array: MLXArray) -> Data {
    if array.dtype == .int32 {
        return array.asArray(Int32.self).withUnsafeBytes { Data($0) }
    }
    return array.asArray(Float.self).withUnsafeBytes { Data($0) }
}

func shortDigest(_ data: Data) -> String {
    var digest = SHA256Digest()
    digest.update(data)
    return String(digest.hexadecimal().prefix(16))
}
