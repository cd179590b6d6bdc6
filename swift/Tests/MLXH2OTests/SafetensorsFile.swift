import Foundation
import MLX

@testable import MLXH2O

/// A safetensors file whose header was checked against its bytes before any array is made of them.
///
/// MLX's own reader believes the header: a shape of 10^21 elements ends the process or takes all
/// memory. Layout: https://github.com/huggingface/safetensors#format.
struct SafetensorsFile {
    /// What the header tells of an array.
    struct Entry {
        let dtype: DType
        let shape: [Int]
        let bytes: Data
    }

    /// Arrays by name.
    let entries: [String: Entry]
    /// The strings that are kept beside them.
    let metadata: [String: String]

    // More axes than any array of a cache has.
    private static let mostAxes = 8

    private static let dtypes: [String: DType] = [
        "BOOL": .bool, "U8": .uint8, "I8": .int8, "U16": .uint16, "I16": .int16, "U32": .uint32,
        "I32": .int32, "U64": .uint64, "I64": .int64, "F16": .float16, "BF16": .bfloat16,
        "F32": .float32,
    ]

    /// Read a file.
    ///
    /// - Throws: ``H2OError/file(_:)``, or the system's error.
    init(_ url: URL) throws {
        let file = try FileHandle(forReadingFrom: url)
        defer { try? file.close() }
        let length = Int(try file.seekToEnd())
        try file.seek(toOffset: 0)
        let prefix = try file.read(upToCount: 8) ?? Data()
        let size = prefix.reversed().reduce(UInt64(0)) { $0 << 8 | UInt64($1) }
        guard prefix.count == 8, size <= UInt64(length - 8) else {
            throw H2OError.file("it is truncated")
        }
        let text = try file.read(upToCount: Int(size)) ?? Data()
        guard let header = try? JSONDecoder().decode(H2OSettingValue.self, from: text).object else {
            throw H2OError.file("its header is no JSON object")
        }
        metadata = (header["__metadata__"]?.object ?? [:]).compactMapValues(\.string)
        let start = 8 + Int(size)
        var entries: [String: Entry] = [:], total = 0
        for (name, entry) in header where name != "__metadata__" {
            let (dtype, shape, range) = try Self.checked(name, entry, length: length - start)
            // Arrays that share bytes would be more in memory than in the file.
            total += range.count
            guard total <= length - start else {
                throw H2OError.file("its arrays overlap")
            }
            try file.seek(toOffset: UInt64(start + range.lowerBound))
            let bytes = range.isEmpty ? Data() : try file.read(upToCount: range.count) ?? Data()
            guard bytes.count == range.count else { throw H2OError.file("it is truncated") }
            entries[name] = Entry(dtype: dtype, shape: shape, bytes: bytes)
        }
        self.entries = entries
    }

    /// What a header's entry tells, where its shape and its bytes agree and lie in the file.
    private static func checked(
        _ name: String, _ entry: H2OSettingValue, length: Int
    ) throws -> (DType, [Int], Range<Int>) {
        guard let dtype = entry["dtype"]?.string.flatMap({ dtypes[$0] }) else {
            throw H2OError.file("its array \"\(name)\" has no dtype that is known here")
        }
        guard let sides = entry["shape"]?.array, sides.count <= mostAxes,
            let offsets = entry["data_offsets"]?.array?.map(\.int), offsets.count == 2,
            let first = offsets[0], let last = offsets[1], first >= 0, first <= last
        else { throw H2OError.file("its array \"\(name)\" has no shape or no place") }
        guard last <= length else { throw H2OError.file("it is truncated") }
        var bytes = dtype.size, shape: [Int] = []
        for side in sides {
            guard let side = side.int, 0 ... Int(Int32.max) ~= side else {
                throw H2OError.file("its array \"\(name)\" has a side of \(side.text)")
            }
            let (product, overflow) = bytes.multipliedReportingOverflow(by: side)
            guard !overflow else { throw H2OError.file("its array \"\(name)\" is too large") }
            (bytes, shape) = (product, shape + [side])
        }
        guard bytes == last - first else {
            throw H2OError.file(
                "its array \"\(name)\" has \(last - first) bytes where its shape \(shape) takes "
                    + "\(bytes)")
        }
        return (dtype, shape, first ..< last)
    }
}

extension SafetensorsFile.Entry {
    /// The array itself.
    var array: MLXArray { MLXArray(bytes, shape, dtype: dtype) }
}
