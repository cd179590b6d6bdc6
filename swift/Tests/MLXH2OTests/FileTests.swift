import Foundation
import MLX
import MLXLMCommon
import Testing

@testable import MLXH2O

/// Saved caches, here and in Python (tools/record_caches.py wrote the fixtures).
@Suite struct FileTests {
    static let fixtures = checkout.appendingPathComponent("swift/Tests/MLXH2OTests/Fixtures")
    static let python = fixtures.appendingPathComponent("python-caches.safetensors")
    static let swift = fixtures.appendingPathComponent("swift-caches.safetensors")

    private func temporary() -> URL {
        FileManager.default.temporaryDirectory
            .appendingPathComponent("\(UUID().uuidString).safetensors")
    }

    @Test func whatIsLoadedGoesOnAsBefore() throws {
        let file = temporary()
        defer { try? FileManager.default.removeItem(at: file) }
        for (name, packing) in CacheTests.stores {
            let rows = RowStream(tokens: 80)
            let cache = try H2OKVCache(
                .heads([20, 28]), policy: H2O().with { $0.evictEvery = 3 }, packing: packing)
            rows.run(cache, [30] + ones(10))
            try saveCaches([cache, KVCacheSimple()], to: file, metadata: ["chat": "über \"x\""])
            let (loaded, metadata) = try loadCaches(from: file)
            #expect(metadata == ["chat": "über \"x\""])
            #expect(loaded[1] is KVCacheSimple && loaded[1].offset == 0)
            let twin = loaded[0] as! H2OKVCache
            #expect(same(rows.run(twin, ones(30)), rows.run(cache, ones(30))), "\(name)")
            #expect(twin.keptPositions() == cache.keptPositions())
            #expect(twin.configuration == cache.configuration)
        }
    }

    /// Python's file is read, and what is written of it is what was written when Python last read it.
    @Test func filesGoBothWays() throws {
        let (caches, metadata) = try loadCaches(from: Self.python)
        #expect(metadata == ["from": "python"])
        let bounded = caches.compactMap { $0 as? H2OKVCache }
        #expect(bounded.count == 3 && caches.count == 4)
        #expect(bounded.allSatisfy { $0.offset == 90 && $0.evicted > 0 })
        #expect((caches[3] as! KVCacheSimple).offset == 9)
        let file = temporary()
        defer { try? FileManager.default.removeItem(at: file) }
        try saveCaches(caches, to: file, metadata: ["from": "swift"])
        if ProcessInfo.processInfo.environment["MLX_H2O_RECORD"] != nil {
            try Data(contentsOf: file).write(to: Self.swift)
        }
        let (arrays, header) = try loadArraysAndMetadata(url: file)
        let (expected, expectedHeader) = try loadArraysAndMetadata(url: Self.swift)
        #expect(header == expectedHeader)
        #expect(arrays.keys.sorted() == expected.keys.sorted())
        #expect(arrays.allSatisfy { same($1, expected[$0]!) })
    }

    @Test func damagedFilesAreRefused() throws {
        let whole = try Data(contentsOf: Self.python), file = temporary()
        defer { try? FileManager.default.removeItem(at: file) }
        var damaged = [
            Data(), Data("no safetensors".utf8), whole.prefix(100), whole.dropLast(3),
            try Data(contentsOf: checkout.appendingPathComponent("golden/remainder.safetensors")),
        ]
        var changed = whole
        changed[changed.count - 9] ^= 1
        damaged.append(changed)
        for bytes in damaged {
            try Data(bytes).write(to: file)
            #expect(throws: H2OError.self) { try loadCaches(from: file) }
        }
        #expect(throws: H2OError.self) { try loadCaches(from: temporary()) }
    }

    @Test(arguments: [
        ("", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
        ("abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
        (
            "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
        ),
    ])
    func digestsAreThoseOfTheStandard(text: String, digest: String) {
        var whole = SHA256Digest(), parts = SHA256Digest()
        whole.update(Data(text.utf8))
        for byte in text.utf8 { parts.update(Data([byte])) }
        #expect(whole.hexadecimal() == digest)
        #expect(parts.hexadecimal() == digest)
    }
}
