import CryptoKit
import Foundation
import MLX

/// SHA-256 of a file's parts, in digits.
struct SHA256Digest {
    private var hash = SHA256()

    mutating func update(_ data: Data) { hash.update(data: data) }

    /// The digest in hexadecimal digits.
    func hexadecimal() -> String {
        hash.finalize().map { String(format: "%02x", $0) }.joined()
    }
}

/// SHA-256 over names, dtypes, shapes and bytes of all arrays, and the header.
func fileDigest(
    _ arrays: [String: (dtype: DType, shape: [Int])], _ header: [String: String],
    bytes: (String) -> Data
) -> String {
    var digest = SHA256Digest()
    for (key, value) in header.sorted(by: { ($0.key, $0.value) < ($1.key, $1.value) }) {
        digest.update(Data("\(key)=\(value)\n".utf8))
    }
    for name in arrays.keys.sorted() {
        let array = arrays[name]!, shape = array.shape
        // As Python prints a tuple.
        let tuple = shape.map(String.init).joined(separator: ", ") + (shape.count == 1 ? "," : "")
        digest.update(Data("\(name) mlx.core.\(pythonName(array.dtype)) (\(tuple))\n".utf8))
        digest.update(bytes(name))
    }
    return digest.hexadecimal()
}

private func pythonName(_ dtype: DType) -> String {
    switch dtype {
    case .bool: "bool_"
    default: "\(dtype)"
    }
}
