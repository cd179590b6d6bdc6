import Foundation
import MLX
import MLXLMCommon
import Testing

@testable import MLXH2O

/// Saved caches, here and in Python (tools/record_caches.py wrote the fixtures).
@Suite struct FileTests {
    static let fixtures = checkout.appendingPathComponent("swift/Tests/MLXH2OTests/Fixtures")
    static let python = fixtures.appendingPathComponent("python-caches.safetensors")

    @Test func whatIsLoadedGoesOnAsBefore() throws {
        let file = temporaryFile()
        defer { try? FileManager.default.removeItem(at: file) }
        for (name, packing) in CacheTests.stores {
            let rows = RowStream(tokens: 80)
            let cache = try H2OKVCache(
                [20, 28], policy: H2OPolicies.H2O().with { $0.evictEvery = 3 },
                packing: packing)
            rows.run(cache, [30] + ones(10))
            try H2OKVCache.saveCaches(
                [cache, KVCacheSimple()], to: file, metadata: ["chat": "über \"x\""])
            let (loaded, metadata) = try H2OKVCache.loadedCaches(from: file)
            #expect(metadata == ["chat": "über \"x\""])
            #expect(loaded[1] is KVCacheSimple && loaded[1].offset == 0)
            let twin = loaded[0] as! H2OKVCache
            #expect(same(rows.run(twin, ones(30)), rows.run(cache, ones(30))), "\(name)")
            #expect(try twin.keptPositions() == cache.keptPositions())
            #expect(twin.configuration == cache.configuration)
        }
    }

    /// Python's file is read, and what is written of it is what was written when Python last read it.
    @Test func filesGoBothWays() throws {
        let (caches, metadata) = try H2OKVCache.loadedCaches(from: Self.python)
        #expect(metadata == ["from": "python"])
        let bounded = caches.compactMap { $0 as? H2OKVCache }
        #expect(bounded.count == 5 && caches.count == 6)
        #expect(bounded.map { $0.frame == nil } == [true, true, true, false, true])
        let later = [Stage(beyond: 96, budgets: [18, 30])]
        #expect(bounded[4].budgets == [20, 28] && bounded[4].settings.filling == later)
        #expect(bounded[3].saturation == [0, 2.5] && bounded[3].policy is H2OPolicies.Salient)
        #expect(bounded.allSatisfy { $0.offset == 90 && $0.evicted > 0 })
        #expect((caches[5] as! KVCacheSimple).offset == 9)
        let file = temporaryFile()
        defer { try? FileManager.default.removeItem(at: file) }
        try H2OKVCache.saveCaches(caches, to: file, metadata: ["from": "swift"])
        try expectRecorded(file, as: "swift-caches.safetensors")
    }

    /// What `mlx_h2o compress` made on another machine: a session goes on from it as Python does, with
    /// the document's pins, beyond the room that was left, and Python reads what the session saves.
    @Test func aCompressedDocumentIsGoneOnWith() async throws {
        let expected = try JSONDecoder().decode(
            Continuation.self,
            from: Data(contentsOf: Self.fixtures.appendingPathComponent("compressed.json")))
        let container = try Recall.container(question: expected.prompt)
        // The last token of Python's is one that its caches have not read.
        let session = H2OChatSession(
            container,
            parameters: GenerateParameters(maxTokens: expected.tokens.count - 1, temperature: 0))
        try await session.restore(from: Self.compressed)
        let document = await session.transcript
        let evicted = await session.withCaches { $0.map { ($0 as! H2OKVCache).evicted } }
        #expect(evicted.allSatisfy { $0 > 0 })
        let reply = try await session.respond(to: Recall.question)
        let tokenizer = try Recall()
        #expect(reply == tokenizer.decode(tokenIds: expected.tokens.dropLast()))
        #expect(
            await session.transcript == document + tokenizer.decode(tokenIds: expected.prompt)
                + reply)
        try await session.withCaches { caches in
            let bounded = caches.map { $0 as! H2OKVCache }
            #expect(bounded.allSatisfy { $0.packing.keyBits != nil && $0.frame != nil })
            let kept = try bounded.map { try $0.keptPositions()[0].map { $0.sorted() } }
            #expect(kept == expected.kept)
            #expect(zip(bounded, evicted).allSatisfy { $0.evicted > $1 })
            let pinned = Set(20 ..< 24)
            #expect(kept.joined().allSatisfy { pinned.isSubset(of: $0) })
        }
        let file = temporaryFile()
        defer { try? FileManager.default.removeItem(at: file) }
        try await session.save(to: file)
        try expectRecorded(file, as: "swift-conversation.safetensors")
    }

    private static let compressed = fixtures.appendingPathComponent("compressed.safetensors")

    /// The same caches in hand, with settings of one's own: a session begins with them.
    @Test func aSessionBeginsWithCaches() async throws {
        let container = try Recall.container(question: [5, 6, 7])
        func session(withTokens: Bool) throws -> H2OChatSession {
            let (caches, metadata) = try H2OKVCache.loadedCaches(from: Self.compressed)
            let dialogue = try H2OSettingValue(parsing: metadata["mlx-h2o dialogue"]!)
            let tokens = dialogue["tokens"]!.array!.compactMap(\.int)
            return H2OChatSession(
                container, h2o: .streaming, caches: caches, tokens: withTokens ? tokens : [],
                parameters: GenerateParameters(maxTokens: 4, temperature: 0))
        }
        let restored = H2OChatSession(
            container, parameters: GenerateParameters(maxTokens: 4, temperature: 0))
        try await restored.restore(from: Self.compressed)
        let reply = try await restored.respond(to: Recall.question)
        let one = try session(withTokens: false)
        #expect(try await one.respond(to: Recall.question) == reply)
        let file = temporaryFile()
        defer { try? FileManager.default.removeItem(at: file) }
        await #expect(throws: H2OError.self) { try await one.save(to: file) }
        let other = try session(withTokens: true)
        #expect(try await other.respond(to: Recall.question) == reply)
        #expect(await other.transcript == restored.transcript)
        try await other.save(to: file)
        // What follows is bounded by the session's own settings.
        await other.clear()
        _ = try await other.respond(to: Recall.question)
        let policy = await other.withCaches { ($0[0] as! H2OKVCache).policy }
        #expect(policy is H2OPolicies.Streaming)
    }

    /// How Python goes on from a file (tools/record_caches.py --compressed).
    private struct Continuation: Decodable {
        let prompt, tokens: [Int]
        let kept: [[[Int]]]
    }

    /// That a file is the fixture that Python's tests read, or becomes it.
    private func expectRecorded(_ file: URL, as name: String) throws {
        let fixture = Self.fixtures.appendingPathComponent(name)
        if ProcessInfo.processInfo.environment["MLX_H2O_RECORD"] != nil {
            try Data(contentsOf: file).write(to: fixture)
        }
        let (arrays, header) = try loadArraysAndMetadata(url: file)
        let (expected, expectedHeader) = try loadArraysAndMetadata(url: fixture)
        #expect(header == expectedHeader)
        #expect(arrays.keys.sorted() == expected.keys.sorted())
        #expect(arrays.allSatisfy { same($1, expected[$0]!) })
    }

    /// Shared keys, and ropes that turn nothing: read as an ordinary cache, they would be another
    /// conversation.
    @Test func cachesThatOnlyPythonHasAreRefused() throws {
        let own = try H2OKVCache([24, 24]).configuration
        _ = try CacheSettings(own)
        let other: [(String, H2OSettingValue)] = [
            ("sharers", .int(2)), ("rope", .object(["dims": .int(64)])),
            (
                "rope",
                .object([
                    "dims": .int(65), "base": .double(1e4), "scale": .double(1),
                    "traditional": .bool(false),
                ])
            ),
        ]
        for (name, value) in other {
            var changed = own.object!
            changed[name] = value
            #expect(throws: H2OError.self, "\(name)") { try CacheSettings(.object(changed)) }
        }
    }

    @Test func aPolicyThatOnlyPythonHasIsRefusedByName() throws {
        let name = "snapkv"
        var config = try H2OKVCache([24, 24]).configuration.object!
        var policy = config["policy"]!.object!
        policy["name"] = .string(name)
        config["policy"] = .object(policy)
        let refused = #expect(throws: H2OError.self) { try CacheSettings(.object(config)) }
        #expect(refused?.localizedDescription.contains(name) == true)
    }

    @Test func damagedFilesAreRefused() throws {
        let whole = try Data(contentsOf: Self.python), file = temporaryFile()
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
            #expect(throws: H2OError.self) { try H2OKVCache.loadedCaches(from: file) }
        }
        #expect(throws: H2OError.self) { try H2OKVCache.loadedCaches(from: temporaryFile()) }
        #expect(throws: H2OError.self) { try H2OSettingValue(parsing: "{") }
    }

    /// The model's own dtype takes the place of the one that was saved.
    @Test(arguments: [DType.float16, .bfloat16])
    func rowsOfAnotherDtypeAreTakenOver(dtype: DType) throws {
        let file = temporaryFile()
        defer { try? FileManager.default.removeItem(at: file) }
        for (name, packing) in CacheTests.stores {
            let cache = try H2OKVCache([20, 28], packing: packing)
            RowStream(tokens: 60).run(cache, [30] + ones(10))
            try H2OKVCache.saveCaches([cache], to: file)
            let twin = try H2OKVCache.loadedCaches(from: file).caches[0] as! H2OKVCache
            let output = RowStream(tokens: 60, dtype: dtype).run(twin, [5] + ones(15))
            let expected = RowStream(tokens: 60).run(cache, [5] + ones(15))
            #expect(output.dtype == dtype && twin.rowTypes!.keyDType == dtype)
            // Four bits in bfloat16 choose other victims now and then.
            let apart = abs(output.asType(.float32) - expected).mean().item(Float.self)
            #expect(apart < 0.05, "\(name) \(apart)")
        }
    }

    @Test func cachesOfAnotherModelAreRefused() throws {
        let file = temporaryFile(), model = try ModelTests.stock()
        defer { try? FileManager.default.removeItem(at: file) }
        func load(_ caches: [any KVCache]) throws -> [any KVCache] {
            try H2OKVCache.saveCaches(caches, to: file)
            return try H2OKVCache.loadCaches(from: file, for: model).caches
        }
        let caches = try H2OConfiguration(budget: .tokens(40)).caches(for: model)
        _ = try ModelTests.generated(model, caches, tokens: 5)
        let loaded = try load(caches)
        #expect(try ModelTests.generated(model, loaded, prompt: 5, tokens: 5).count == 5)
        #expect(throws: H2OError.self) { try load(Array(caches.dropLast())) }
        let wide = try H2OKVCache(
            [40, 40], policy: H2OPolicies.KeyDiff(), attends: false)
        RowStream(tokens: 50, width: 64).run(wide, [30])
        #expect(throws: H2OError.self) { try load([wide] + caches.dropFirst()) }
        let attending = try H2OKVCache([40, 40])
        RowStream(tokens: 50).run(attending, [30])
        #expect(throws: H2OError.self) { try load([attending] + caches.dropFirst()) }
    }

    /// `precondition` and `assert` end a release build without a word, or not at all.
    @Test func everyStopHasAMessageInReleaseBuilds() throws {
        let sources = checkout.appendingPathComponent("swift/Sources")
        let files = try #require(FileManager.default.enumerator(atPath: sources.path))
        for case let name as String in files where name.hasSuffix(".swift") {
            let text = try String(
                contentsOf: sources.appendingPathComponent(name), encoding: .utf8)
            for silent in ["precondition(", "preconditionFailure(", "assert(", "fatalError()"] {
                #expect(!text.contains(silent), "\(name): \(silent)")
            }
        }
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
