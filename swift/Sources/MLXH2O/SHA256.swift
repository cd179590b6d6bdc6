import CryptoKit
import Foundation

/// SHA-256 of a file's parts, in digits.
struct SHA256Digest {
    private var hash = SHA256()

    mutating func update(_ data: Data) { hash.update(data: data) }

    /// The digest in hexadecimal digits.
    func hexadecimal() -> String {
        hash.finalize().map { String(format: "%02x", $0) }.joined()
    }
}
