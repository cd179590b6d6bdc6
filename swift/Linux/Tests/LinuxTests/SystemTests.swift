import CryptoKit
import Dispatch
import DispatchMemoryPressure
import Foundation
import Testing

/// What Apple's systems have beside MLX.
@Suite struct SystemTests {
    /// The examples of FIPS 180-4 and of NIST's test vectors.
    @Test(arguments: [
        ("", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
        ("abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
        (
            "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
        ),
        (
            String(repeating: "a", count: 1_000_000),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"
        ),
    ])
    func digestsAreThoseOfTheStandard(text: String, digest: String) {
        func digits(_ hash: SHA256) -> String {
            hash.finalize().map { String(format: "%02x", $0) }.joined()
        }
        var whole = SHA256(), parts = SHA256()
        whole.update(data: Data(text.utf8))
        let bytes = Array(text.utf8)
        for first in stride(from: 0, to: bytes.count, by: 1001) {
            parts.update(data: bytes[first ..< min(first + 1001, bytes.count)])
            _ = parts.finalize()
        }
        #expect(digits(whole) == digest)
        #expect(digits(parts) == digest)
        #expect(whole.finalize() == parts.finalize())
    }

    @Test(.timeLimit(.minutes(1))) func memoryPressureReachesThoseWhoAskedForIt() async {
        let (events, heard) = AsyncStream.makeStream(of: UInt.self)
        let source = DispatchSource.makeMemoryPressureSource(eventMask: [.warning, .critical])
        let mask: DispatchSource.MemoryPressureEvent = source.mask
        #expect(mask == [.warning, .critical])
        source.setEventHandler {
            let event: DispatchSource.MemoryPressureEvent = source.data
            heard.yield(event.rawValue)
        }
        var found = events.makeAsyncIterator()
        // Before activation nothing is heard, nor what was not asked for.
        DispatchSource.simulateMemoryPressure(.normal)
        source.activate()
        DispatchSource.simulateMemoryPressure(.warning)
        #expect(await found.next() == 2)
        DispatchSource.simulateMemoryPressure(.normal)
        DispatchSource.simulateMemoryPressure(.critical)
        #expect(await found.next() == 4)
        source.cancel()
    }
}
