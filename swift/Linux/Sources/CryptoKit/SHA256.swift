import Foundation

/// SHA-256 (FIPS 180-4).
public struct SHA256: Sendable {
    public typealias Digest = SHA256Digest

    private var state: [UInt32] = [
        0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab,
        0x5be0_cd19,
    ]
    private var rest: [UInt8] = []
    private var count: UInt64 = 0

    public init() {}

    public mutating func update<D: DataProtocol>(data: D) {
        count += UInt64(data.count)
        var bytes = rest
        bytes.append(contentsOf: data)
        let whole = bytes.count / 64 * 64
        bytes.withUnsafeBufferPointer { buffer in
            for first in stride(from: 0, to: whole, by: 64) {
                SHA256.compress(
                    &state, UnsafeBufferPointer(rebasing: buffer[first ..< first + 64]))
            }
        }
        rest = Array(bytes[whole...])
    }

    public func finalize() -> SHA256Digest {
        var last = self
        let bits = count * 8
        var tail: [UInt8] = [0x80]
        tail += Array(repeating: 0, count: (119 - Int(count % 64)) % 64)
        tail += (0 ..< 8).map { UInt8(truncatingIfNeeded: bits >> (56 - 8 * UInt64($0))) }
        last.update(data: tail)
        return SHA256Digest(
            bytes: last.state.flatMap { word in
                (0 ..< 4).map { UInt8(truncatingIfNeeded: word >> (24 - 8 * UInt32($0))) }
            })
    }

    private static func compress(_ state: inout [UInt32], _ block: UnsafeBufferPointer<UInt8>) {
        func rotated(_ x: UInt32, _ n: UInt32) -> UInt32 { x >> n | x << (32 - n) }
        withUnsafeTemporaryAllocation(of: UInt32.self, capacity: 64) { w in
            for i in 0 ..< 16 {
                w[i] =
                    UInt32(block[4 * i]) << 24 | UInt32(block[4 * i + 1]) << 16
                    | UInt32(block[4 * i + 2]) << 8 | UInt32(block[4 * i + 3])
            }
            for i in 16 ..< 64 {
                let (a, b) = (w[i - 15], w[i - 2])
                let s0 = rotated(a, 7) ^ rotated(a, 18) ^ a >> 3
                let s1 = rotated(b, 17) ^ rotated(b, 19) ^ b >> 10
                w[i] = w[i - 16] &+ s0 &+ w[i - 7] &+ s1
            }
            var (a, b, c, d) = (state[0], state[1], state[2], state[3])
            var (e, f, g, h) = (state[4], state[5], state[6], state[7])
            for i in 0 ..< 64 {
                let s1 = rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)
                let t1 = h &+ s1 &+ ((e & f) ^ (~e & g)) &+ constants[i] &+ w[i]
                let s0 = rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)
                let t2 = s0 &+ ((a & b) ^ (a & c) ^ (b & c))
                (h, g, f, e, d, c, b, a) = (g, f, e, d &+ t1, c, b, a, t1 &+ t2)
            }
            for (i, word) in [a, b, c, d, e, f, g, h].enumerated() { state[i] = state[i] &+ word }
        }
    }

    /// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
    private static let constants: [UInt32] = {
        var primes: [Int] = []
        var candidate = 2
        while primes.count < 64 {
            if primes.allSatisfy({ candidate % $0 != 0 }) { primes.append(candidate) }
            candidate += 1
        }
        return primes.map { prime in
            // The integer cube root of prime * 2^96, whose low 32 bits are those of the fraction.
            var low: UInt64 = 0, high: UInt64 = 1 << 35
            while high - low > 1 {
                let middle = (low + high) / 2
                let square = middle.multipliedFullWidth(by: middle)
                let lower = square.low.multipliedFullWidth(by: middle)
                let upper = square.high * middle + lower.high
                if upper < UInt64(prime) << 32 || upper == UInt64(prime) << 32 && lower.low == 0 {
                    low = middle
                } else {
                    high = middle
                }
            }
            return UInt32(truncatingIfNeeded: low)
        }
    }()
}

/// The 32 bytes of a digest.
public struct SHA256Digest: Sequence, Hashable, Sendable {
    let bytes: [UInt8]

    public func makeIterator() -> Array<UInt8>.Iterator { bytes.makeIterator() }
}
