import Foundation
import MLX

@testable import MLXH2O

/// The root of the checkout.
let checkout = URL(fileURLWithPath: #filePath).resolvingSymlinksInPath()
    .deletingLastPathComponent().deletingLastPathComponent()
    .deletingLastPathComponent().deletingLastPathComponent().deletingLastPathComponent()

struct GoldenError: Error, CustomStringConvertible {
    let description: String

    init(_ description: String) { self.description = description }
}

/// One case of the golden vectors (docs/reference/golden.md).
struct GoldenCase {
    let group: String
    let name: String
    let parameters: H2OSettingValue

    subscript(_ name: String) -> H2OSettingValue { parameters[name] ?? .null }
    func int(_ name: String) -> Int { self[name].int! }
    func text(_ name: String) -> String { self[name].string ?? "" }
    func numbers(_ name: String) -> [Float]? { parameters.numbers(name) }
    var scale: Float { Float(self["scale"].double!) }
    var dtype: DType {
        ["float16": DType.float16, "bfloat16": .bfloat16][text("dtype")] ?? .float32
    }

    func policy() throws -> any H2OPolicy {
        let settings = self["policy"].object!
        return try H2OPolicies.make(
            settings["name"]!.string!, settings: settings.filter { $0.key != "name" })
    }

    /// A tensor of this case: nearly normal numbers, exact in float32, times 2^power.
    func tensor(
        _ which: Tensor, _ shape: [Int], dtype: DType = .float32, layer: Int = 0, power: Int = 0
    ) -> MLXArray {
        let factor = Float(sign: .plus, exponent: power - 15, significand: 1)
        let numbers = hashed(which, shape.reduce(1, *), layer: layer).map { z -> Float in
            let total = (z & 0xFFFF) + (z >> 16 & 0xFFFF) + (z >> 32 & 0xFFFF) + (z >> 48)
            return Float(Int(total) - 131070) * factor
        }
        return MLXArray(numbers, shape).asType(dtype)
    }

    /// The size of the generated numbers: 1, or 2^power where that is larger. A sum of large ones
    /// may cancel, and its absolute error is then theirs.
    var size: Double { exp2(Double(max(0, self["power"].int ?? 0))) }

    /// SplitMix64 at the counters 1 to count.
    func hashed(_ which: Tensor, _ count: Int, layer: Int = 0) -> [UInt64] {
        let seed = UInt64(int("seed") * 65536 + layer * 16 + which.rawValue)
        return (0 ..< UInt64(count)).map { i in
            var z = seed &+ (i + 1) &* 0x9E37_79B9_7F4A_7C15
            z = (z ^ z >> 30) &* 0xBF58_476D_1CE4_E5B9
            z = (z ^ z >> 27) &* 0x94D0_49BB_1331_11EB
            return z ^ z >> 31
        }
    }
}

extension H2OSettingValue {
    /// A member that is a number or several.
    func numbers(_ name: String) -> [Float]? {
        self[name].map { ($0.array ?? [$0]).map { Float($0.double!) } }
    }
}

/// Which tensor of a case.
enum Tensor: Int {
    case q, k, v, sinks, mask, lse, logit, meanKey, meanValue, variance, weight, worth
}

typealias Arrays = [String: MLXArray]

/// Golden vectors as they lie in a folder, checked against their manifest.
struct Golden {
    static let schema = 1

    let cases: [GoldenCase]
    let tolerances: H2OSettingValue
    let arrays: [String: Arrays]

    /// Those that go with the tests; a device has no checkout.
    nonisolated(unsafe) static let shipped = Result {
        let carried = Bundle.module.url(forResource: "golden", withExtension: nil)
        return try Golden(folder: carried ?? checkout.appendingPathComponent("golden"))
    }

    init(folder: URL) throws {
        let url = folder.appendingPathComponent("manifest.json")
        guard let text = try? String(contentsOf: url, encoding: .utf8),
            let manifest = try? H2OSettingValue(parsing: text),
            manifest["format"]?.string == "mlx-h2o golden"
        else {
            throw GoldenError("\(url.path) is no manifest of golden vectors.")
        }
        guard manifest["schema"]?.int == Golden.schema else {
            throw GoldenError(
                "\(url.path) has schema \(manifest["schema"]?.text ?? "unknown"); this reads "
                    + "\(Golden.schema).")
        }
        var arrays: [String: Arrays] = [:]
        for (name, expected) in manifest["files"]!.object! {
            let file = folder.appendingPathComponent(name)
            var digest = SHA256Digest()
            digest.update(try Data(contentsOf: file))
            guard digest.hexadecimal() == expected["sha256"]?.string else {
                throw GoldenError("\(file.path) was changed: its SHA-256 does not match.")
            }
            if file.pathExtension == "safetensors" {
                arrays[file.deletingPathExtension().lastPathComponent] = try loadArrays(url: file)
            }
        }
        self.arrays = arrays
        tolerances = manifest["tolerances"]!
        cases = manifest["cases"]!.array!.map {
            GoldenCase(
                group: $0["group"]!.string!, name: $0["name"]!.string!,
                parameters: $0["parameters"]!)
        }
    }

    /// The arrays of a case that are "in" or "out", by name.
    func of(_ golden: GoldenCase, _ kind: String) -> Arrays {
        let prefix = "\(golden.name)/\(kind)."
        return arrays[golden.group]!.reduce(into: Arrays()) { all, entry in
            if entry.key.hasPrefix(prefix) {
                all[String(entry.key.dropFirst(prefix.count))] = entry.value
            }
        }
    }

    /// What of a case's results is not the golden one.
    func differences(_ actual: Arrays, _ golden: GoldenCase) -> [String] {
        let expected = of(golden, "out")
        return Set(actual.keys).union(expected.keys).sorted().compactMap { name in
            guard let a = actual[name], let b = expected[name] else {
                return "\(golden.name): \(name) is on one side only"
            }
            guard a.shape == b.shape && a.dtype == b.dtype else {
                return "\(golden.name): \(name) is \(a.shape) \(a.dtype), not \(b.shape) \(b.dtype)"
            }
            let error = distance(a, b, size: golden.size)
            return error <= 1 ? nil : "\(golden.name): \(name) is off by \(error) tolerances"
        }
    }

    /// The largest error in units of what is tolerated; infinite where exactness is asked for.
    private func distance(_ actual: MLXArray, _ golden: MLXArray, size: Double) -> Double {
        guard golden.dtype.isFloatingPoint else {
            let same =
                golden.dtype == .bool
                ? actual.asArray(Bool.self) == golden.asArray(Bool.self)
                : actual.asArray(Int32.self) == golden.asArray(Int32.self)
            return same ? 0 : .infinity
        }
        let tolerance = tolerances["\(golden.dtype)"]!
        let (absolute, relative) = (tolerance["absolute"]!.double!, tolerance["relative"]!.double!)
        let pairs = zip(
            actual.asType(.float32).asArray(Float.self), golden.asType(.float32).asArray(Float.self)
        )
        return pairs.reduce(0) { worst, pair in
            let (a, b) = (Double(pair.0), Double(pair.1))
            if a == b || a.isNaN && b.isNaN { return worst }
            let error = abs(a - b) / (size * absolute + relative * abs(b))
            return max(worst, error.isFinite && b.isFinite ? error : .infinity)
        }
    }
}
