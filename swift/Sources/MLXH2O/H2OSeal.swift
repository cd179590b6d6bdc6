import CMLXH2O
import Foundation

#if canImport(Darwin)
    import CryptoKit
#endif

/// The cipher of one file of rows: AES-GCM, or what an app has instead.
///
/// It is used by the conversation's thread and by the one that writes, maybe at once.
public protocol H2OFileCipher: Sendable {
    /// Seals bytes, and gives as many, with a tag of 16. The nonce has 12 bytes.
    func seal(_ bytes: Data, nonce: Data, authenticating: Data) throws -> (bytes: Data, tag: Data)
    /// Opens them. Throws where the tag is not theirs.
    func open(_ bytes: Data, tag: Data, nonce: Data, authenticating: Data) throws -> Data
}

/// Seals the files of rows of conversations, and the records beside them (``H2OSpill/seal``).
///
/// With CryptoKit, `H2OSeal(key:)` seals as Python's `Spill(key=...)` does, so that each reads the other's
/// files. What is in a sealed file cannot be read without the key, and changes to it are noticed.
public final class H2OSeal: Sendable, Equatable {
    private let makeCipher: @Sendable (Data) throws -> any H2OFileCipher

    /// - Parameter makeCipher: Makes the cipher of one file, by 32 random bytes that its header has. A file's
    ///   key should come from an app's key and these, so that nonces have to differ within a file only.
    public init(_ makeCipher: @escaping @Sendable (_ salt: Data) throws -> any H2OFileCipher) {
        self.makeCipher = makeCipher
    }

    /// Whether they are the same object.
    public static func == (one: H2OSeal, other: H2OSeal) -> Bool { one === other }

    /// In the engine's terms; it lets this object go in the end.
    var functions: mlx_h2o_seal {
        var functions = mlx_h2o_seal()
        functions.size = MemoryLayout<mlx_h2o_seal>.size
        functions.context = Unmanaged.passRetained(self).toOpaque()
        functions.release = { Unmanaged<H2OSeal>.fromOpaque($0!).release() }
        functions.open = { context, salt, count in
            let seal = Unmanaged<H2OSeal>.fromOpaque(context!).takeUnretainedValue()
            guard let cipher = try? seal.makeCipher(Data(bytes: salt!, count: count)) else {
                return nil
            }
            return Unmanaged.passRetained(CipherOfFile(cipher)).toOpaque()
        }
        functions.close = { Unmanaged<CipherOfFile>.fromOpaque($0!).release() }
        functions.encrypt = { cipher, nonce, associated, associatedCount, data, count, tag in
            guard
                let sealed = try? CipherOfFile.of(cipher).seal(
                    Data(bytes: data!, count: count), nonce: Data(bytes: nonce!, count: nonceBytes),
                    authenticating: bytes(associated, associatedCount)),
                sealed.bytes.count == count, sealed.tag.count == tagBytes
            else { return 1 }
            sealed.bytes.copyBytes(to: data!, count: count)
            sealed.tag.copyBytes(to: tag!, count: tagBytes)
            return 0
        }
        functions.decrypt = { cipher, nonce, associated, associatedCount, data, count, tag in
            guard
                let opened = try? CipherOfFile.of(cipher).open(
                    Data(bytes: data!, count: count), tag: Data(bytes: tag!, count: tagBytes),
                    nonce: Data(bytes: nonce!, count: nonceBytes),
                    authenticating: bytes(associated, associatedCount)),
                opened.count == count
            else { return 1 }
            opened.copyBytes(to: data!, count: count)
            return 0
        }
        return functions
    }
}

private let nonceBytes = 12
private let tagBytes = 16

private func bytes(_ start: UnsafePointer<UInt8>?, _ count: Int) -> Data {
    start.map { Data(bytes: $0, count: count) } ?? Data()
}

/// A cipher as the engine holds it.
private final class CipherOfFile: Sendable {
    let cipher: any H2OFileCipher

    init(_ cipher: any H2OFileCipher) { self.cipher = cipher }

    static func of(_ handle: UnsafeMutableRawPointer?) -> any H2OFileCipher {
        Unmanaged<CipherOfFile>.fromOpaque(handle!).takeUnretainedValue().cipher
    }
}

#if canImport(Darwin)
    extension H2OSeal {
        /// AES-GCM with a key of each file's own, made of this one (HKDF-SHA256).
        ///
        /// - Parameter key: At least 16 bytes that are hard to guess, no password; in the keychain between
        ///   two runs of the app.
        public convenience init(key: SymmetricKey) {
            let bytes = key.withUnsafeBytes { Data($0) }
            self.init { salt in
                let ofFile = HKDF<SHA256>.deriveKey(
                    inputKeyMaterial: SymmetricKey(data: bytes), salt: salt,
                    info: Data("mlx-h2o sealed rows".utf8), outputByteCount: 32)
                return AESCipher(key: ofFile.withUnsafeBytes { Data($0) })
            }
        }
    }

    private struct AESCipher: H2OFileCipher {
        let key: Data

        func seal(
            _ bytes: Data, nonce: Data, authenticating: Data
        ) throws -> (bytes: Data, tag: Data) {
            let box = try AES.GCM.seal(
                bytes, using: SymmetricKey(data: key), nonce: AES.GCM.Nonce(data: nonce),
                authenticating: authenticating)
            return (box.ciphertext, box.tag)
        }

        func open(_ bytes: Data, tag: Data, nonce: Data, authenticating: Data) throws -> Data {
            let box = try AES.GCM.SealedBox(
                nonce: AES.GCM.Nonce(data: nonce), ciphertext: bytes, tag: tag)
            return try AES.GCM.open(
                box, using: SymmetricKey(data: key), authenticating: authenticating)
        }
    }
#endif
