import Foundation
import MLX
import MLXLMCommon
import Testing

@testable import MLXH2O

/// Files behind the memory, from which evicted rows come back.
@Suite(.serialized) struct SpillTests {
    private func folder() -> URL {
        FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
    }

    private func files(in folder: URL) -> [String] {
        let all = try? FileManager.default.contentsOfDirectory(atPath: folder.path)
        return (all ?? []).filter { !$0.hasPrefix(".") }
    }

    /// All files of a folder, by name.
    private func contents(of folder: URL) throws -> [String: Data] {
        let names = try FileManager.default.contentsOfDirectory(atPath: folder.path)
        let all = try names.map { ($0, try Data(contentsOf: folder.appendingPathComponent($0))) }
        return Dictionary(uniqueKeysWithValues: all)
    }

    private func often(_ folder: URL) throws -> H2OSpill {
        try H2OSpill(folder: folder, every: 8, window: 4, pages: 1, rows: 6, ahead: 3)
    }

    @Test func rowsComeBackAndTheFileGoesWithTheCaches() throws {
        let folder = folder()
        defer { try? FileManager.default.removeItem(at: folder) }
        do {
            let file = try EngineSpill(often(folder), layers: 2)
            let caches = try (0 ..< 2).map {
                try H2OKVCache(
                    CacheSettings(
                        .heads([24, 32]), policy: H2OPolicies.Salient(), remainder: true,
                        attends: true, packing: .dense, undo: 0),
                    PressureShare(nil, nil),
                    file: SpilledLayer(
                        spill: file, layer: $0, returning: $0 == 0 ? nil : [true, true]))
            }
            let rows = (0 ..< 2).map { RowStream(seed: 5 + $0, tokens: 120) }
            for length in [40] + ones(80) {
                for (stream, cache) in zip(rows, caches) { stream.run(cache, [length]) }
            }
            #expect(caches.allSatisfy { $0.spillFailure == nil && $0.rowsReturned > 0 })
            #expect(files(in: folder).count == 1)
            // A copy goes on without the file.
            let twin = try #require(caches[0].copy() as? H2OKVCache)
            #expect(twin.rowsReturned == 0 && twin.spillFailure == nil)
            // Every token is still a slot's or the remainder's.
            for cache in caches {
                let folded = try cache.evictedRemainder!.count.asArray(Float.self)
                #expect(folded == [96, 88])
            }
        }
        #expect(files(in: folder).isEmpty)
    }

    @Test func withoutAFolderTheConversationGoesOn() throws {
        let blocked = folder()
        try Data().write(to: blocked)
        defer { try? FileManager.default.removeItem(at: blocked) }
        let configuration = try H2OConfiguration(
            budget: .tokens(64), spill: often(blocked.appendingPathComponent("below")))
        let model = try H2OModels.load(folder: GoldenReplay.embeddedModel, dtype: .float32)
        let caches = try configuration.caches(for: model).map { $0 as! H2OKVCache }
        #expect(try ModelTests.generated(model, caches, prompt: 100, tokens: 20).count == 20)
        #expect(caches.allSatisfy { $0.spillFailure?.contains("no file can be made") == true })
        #expect(caches.allSatisfy { $0.failure == nil && $0.rowsReturned == 0 })
    }

    @Test func aModelsConversationsEachHaveAFile() throws {
        let folder = folder()
        defer { try? FileManager.default.removeItem(at: folder) }
        let configuration = try H2OConfiguration(budget: .tokens(48), spill: often(folder))
        let model = try H2OModels.load(folder: GoldenReplay.embeddedModel, dtype: .float32)
        do {
            let both = try (0 ..< 2).map { _ in
                try configuration.caches(for: model).map { $0 as! H2OKVCache }
            }
            for caches in both {
                #expect(
                    try ModelTests.generated(model, caches, prompt: 200, tokens: 40).count == 40)
                #expect(caches.allSatisfy { $0.spillFailure == nil })
                #expect(caches.contains { $0.rowsReturned > 0 })
            }
            #expect(files(in: folder).count == 2)
        }
        #expect(files(in: folder).isEmpty)
    }

    @Test func aFileThatGoesHasTheLayersToWhichRowsComeBack() throws {
        let folder = folder(), model = try model()
        defer { try? FileManager.default.removeItem(at: folder) }
        let profile = try H2OProfile(
            contentsOf: GoldenReplay.embeddedModel.appendingPathComponent(H2OProfile.fileName))
        for keeps in [true, false] {
            var spill = try often(folder)
            spill.keeps = keeps
            let configuration = try H2OConfiguration(
                budget: .tokens(48), headBudgets: .profile(profile), spill: spill)
            let caches = try configuration.caches(for: model).map { $0 as! H2OKVCache }
            #expect(try ModelTests.generated(model, caches, prompt: 200, tokens: 40).count == 40)
            #expect(caches.map { $0.file != nil } == [keeps, keeps, keeps, true])
            #expect(caches[3].spillFailure == nil && caches[3].rowsReturned > 0)
        }
    }

    /// Facts come back, so slots are bought for prose first.
    @Test func whereRowsComeBackTheLossOverEchoesCountsLess() throws {
        let folder = folder(), model = try model()
        defer { try? FileManager.default.removeItem(at: folder) }
        let profile = try H2OProfile(
            contentsOf: GoldenReplay.embeddedModel.appendingPathComponent(H2OProfile.fileName))
        func shares(rows: Int) throws -> (mean: Int, budgets: [[Int]]) {
            var spill = try often(folder)
            spill.rows = rows
            let configuration = try H2OConfiguration(
                budget: .tokens(180), headBudgets: .profile(profile), spill: spill)
            let plans = try configuration.caches(for: model).map { ($0 as! H2OKVCache).settings }
            return (plans[0].filling[0].beyond, plans.map { $0.filling.last!.budgets })
        }
        let least = H2OPolicies.Salient().leastBudget + H2OConfiguration.fewestChoices
        let back = try shares(rows: 16), never = try shares(rows: 0)
        #expect(try never.budgets == profile.budgets(mean: never.mean, least: least))
        #expect(
            try back.budgets == profile.whereRowsReturn.budgets(mean: back.mean, least: least))
        #expect(back.budgets != never.budgets)
        #expect(profile.whereRowsReturn.retrievalHeads == profile.retrievalHeads)
    }

    /// Rows that wait, queries and leases are paid for with slots.
    @Test func aSizeInBytesHoldsTheFileToo() throws {
        let model = try model()
        let profile = try H2OProfile(
            contentsOf: GoldenReplay.embeddedModel.appendingPathComponent(H2OProfile.fileName))
        // By the profile rows are packed, and rows come back to one layer.
        let ways: [(H2OConfiguration.HeadBudgets, Bool, Int)] = [
            (.uniform, false, 150_000), (.uniform, true, 150_000),
            (.profile(profile), false, 60_000), (.profile(profile), true, 60_000),
        ]
        for (shares, keeps, bytes) in ways {
            let folder = folder()
            defer { try? FileManager.default.removeItem(at: folder) }
            var spill = try often(folder)
            spill.keeps = keeps
            var configuration = try H2OConfiguration(
                budget: .bytes(bytes), headBudgets: shares, spill: spill)
            let caches = try configuration.caches(for: model).map { $0 as! H2OKVCache }
            var most = 0
            for tokens in [400, 400] + ones(80) {
                let prompt = MLXArray((0 ..< tokens).map { Int32(($0 * $0 * 31 + most) % 199 + 3) })
                eval(model(prompt[.newAxis], cache: caches))
                most = max(most, caches.reduce(0) { $0 + $1.nbytes })
            }
            #expect(caches.contains { $0.rowsReturned > 0 })
            #expect(caches.allSatisfy { $0.spillFailure == nil })
            #expect(most <= bytes, "\(shares) \(keeps)")
            // Rows wait for the disk in fewer bytes than there is room for.
            #expect(Double(most) >= 0.6 * Double(bytes), "\(shares) \(keeps)")
            configuration.spill = nil
            let without = try configuration.caches(for: model).map { $0 as! H2OKVCache }
            eval(model(MLXArray([1, 2, 3] as [Int32])[.newAxis], cache: without))
            #expect(Self.slots(caches) < Self.slots(without))
        }
    }

    private static func slots(_ caches: [H2OKVCache]) -> Int {
        caches.flatMap { $0.budgets ?? [] }.reduce(0, +)
    }

    @Test func whatCannotBeIsRefused() throws {
        for wrong in [
            { try H2OSpill(every: 0) }, { try H2OSpill(window: 0) }, { try H2OSpill(pages: 0) },
            { try H2OSpill(rows: -1) }, { try H2OSpill(room: 0) }, { try H2OSpill(room: 1.5) },
            { try H2OSpill(ahead: -1) }, { try H2OSpill(folder: URL(string: "https://a.b/c")!) },
        ] {
            #expect(throws: H2OError.self) { try wrong() }
        }
        var configuration = try H2OConfiguration(budget: .tokens(64), spill: H2OSpill())
        configuration.spill?.every = 1 << 20
        #expect(throws: H2OError.self) { try configuration.validate() }
    }

    @Test func aStockModelSaysThatItHasNone() throws {
        let folder = folder()
        let configuration = try H2OConfiguration(budget: .tokens(64), spill: often(folder))
        let caches = try configuration.caches(for: ModelTests.stock())
        #expect(caches.notices.map(\.subject).contains(.spill))
        #expect(files(in: folder).isEmpty)
    }

    // MARK: conversations that go on from their files

    private func model() throws -> any LanguageModel {
        try H2OModels.load(folder: GoldenReplay.embeddedModel, dtype: .float32)
    }

    private func kept(_ folder: URL) throws -> H2OConfiguration {
        var spill = try often(folder)
        spill.keeps = true
        return try H2OConfiguration(budget: .tokens(48), spill: spill)
    }

    /// A model's logits for the tokens at these positions.
    private func logits(
        _ model: any LanguageModel, _ caches: [any KVCache], _ positions: Range<Int>
    ) -> MLXArray {
        let tokens = MLXArray(positions.map { Int32($0 * 37 % 128) }, [1, positions.count])
        let output = model(LMInput.Text(tokens: tokens), cache: caches, state: nil).logits
        eval(output)
        return output
    }

    /// The caches of a conversation of so many tokens.
    private func begun(
        _ model: any LanguageModel, _ configuration: H2OConfiguration, tokens: Int = 100
    ) throws -> [any KVCache] {
        let caches = try configuration.caches(for: model)
        _ = logits(model, caches, 0 ..< tokens)
        return caches
    }

    /// Resuming is refused as a file that cannot be used, in words that say this.
    private func expectRefusal(
        _ url: URL, _ model: any LanguageModel, _ words: String,
        _ place: Testing.SourceLocation = #_sourceLocation
    ) {
        #expect(sourceLocation: place) {
            try H2OSpill.resumedCaches(from: url, for: model)
        } throws: { error in
            guard case .file(let message)? = error as? H2OError else { return false }
            return message.contains(url.lastPathComponent) && message.contains(words)
        }
    }

    @Test func oneThatIsRecordedAndResumedIsAsOneThatNeverEnded() throws {
        let folder = folder()
        defer { try? FileManager.default.removeItem(at: folder) }
        let model = try model()
        do {
            let never = try begun(
                model, H2OConfiguration(budget: .tokens(48), spill: often(folder)))
            var caches = try begun(model, kept(folder)), at = 100
            // Within the first block after a chunk, at its end, and within later ones.
            for end in [105, 112, 131] {
                for token in at ..< end {
                    let next = token ..< token + 1
                    #expect(same(logits(model, never, next), logits(model, caches, next)))
                }
                at = end
                let url = try #require(try H2OSpill.recordState(of: caches))
                caches = []
                caches = try H2OSpill.resumedCaches(from: url, for: model)
                #expect(caches.allSatisfy { $0.offset == end })
            }
            #expect(
                same(logits(model, never, at ..< at + 30), logits(model, caches, at ..< at + 30)))
            let pairs = zip(never, caches).map { ($0 as! H2OKVCache, $1 as! H2OKVCache) }
            #expect(pairs.contains { $0.0.rowsReturned > 0 })
            for (one, other) in pairs {
                #expect(one.spillFailure == nil && other.spillFailure == nil)
                #expect(one.settings.json.text == other.settings.json.text)
                #expect(try one.keptPositions() == other.keptPositions())
                #expect(try one.keptScores() == other.keptScores())
            }
            // One that is not to stay is not recorded, and goes.
            #expect(try H2OSpill.recordState(of: never) == nil)
        }
        #expect(files(in: folder).filter { $0.hasSuffix(".rows") }.count == 1)
        #expect(files(in: folder).filter { $0.contains(".rows.state-") }.count == 2)
    }

    @Test func withoutARecordNothingStays() throws {
        let folder = folder()
        defer { try? FileManager.default.removeItem(at: folder) }
        let model = try model()
        do {
            let empty = try kept(folder).caches(for: model)
            #expect(try H2OSpill.recordState(of: empty) == nil)
            let caches = try begun(model, kept(folder))
            #expect(files(in: folder).count == 1)
            // What was set by hand is no longer the file's.
            let cache = caches[0] as! H2OKVCache, names = cache.metaState, state = cache.state
            (cache.state, cache.metaState) = (state, names)
            #expect(cache.failure == nil && cache.spillFailure?.contains("state was set") == true)
            #expect(try H2OSpill.recordState(of: caches) == nil)
        }
        #expect(files(in: folder).isEmpty)
    }

    @Test func filesThatCannotBeGoneOnWithAreRefused() throws {
        let folder = folder()
        defer { try? FileManager.default.removeItem(at: folder) }
        let model = try model(), missing = folder.appendingPathComponent("none.rows")
        expectRefusal(missing, model, "No such file")
        expectRefusal(URL(string: "https://a.b/none.rows")!, model, "file URL")
        var caches = try begun(model, kept(folder))
        let url = try #require(try H2OSpill.recordState(of: caches))
        expectRefusal(url, model, "open already")
        caches = []
        let records = files(in: folder).filter { $0.contains(".state-") }
        #expect(records.count == 1)
        for place in records.map(folder.appendingPathComponent) {
            var bytes = try Data(contentsOf: place)
            bytes[bytes.count / 2] ^= 1
            try bytes.write(to: place)
            expectRefusal(url, model, "no record")
            bytes[bytes.count / 2] ^= 1
            try bytes.write(to: place)
        }
        // A file that was refused is as it was.
        #expect(try H2OSpill.resumedCaches(from: url, for: model).allSatisfy { $0.offset == 100 })
        var file = try Data(contentsOf: url)
        file[20] ^= 1
        try file.write(to: url)
        expectRefusal(url, model, "damaged")
    }

    @Test func filesOfOtherModelsAreRefused() throws {
        let folder = folder()
        defer { try? FileManager.default.removeItem(at: folder) }
        let model = try model(), layers = try H2OConfiguration.default.plainCaches(of: model).count
        var spill = try often(folder)
        spill.keeps = true
        for (count, words) in [
            (layers + 1, "there is place for \(layers)"), (layers, "another model's"),
        ] {
            var url: URL?
            do {
                let file = try EngineSpill(spill, layers: count)
                let caches = try (0 ..< count).map {
                    try H2OKVCache(
                        CacheSettings(
                            .heads([24]), policy: H2OPolicies.Salient(), remainder: true,
                            attends: true, packing: .dense, undo: 0),
                        PressureShare(nil, nil),
                        file: SpilledLayer(spill: file, layer: $0, returning: nil))
                }
                let streams = caches.map { _ in RowStream(kvHeads: 1, tokens: 64, width: 16) }
                for (stream, cache) in zip(streams, caches) { stream.run(cache, [40]) }
                url = try H2OSpill.recordState(of: caches)
                // Rows that came after the record.
                for (stream, cache) in zip(streams, caches) { stream.run(cache, ones(24)) }
            }
            let before = try contents(of: folder)
            expectRefusal(try #require(url), model, words)
            #expect(try contents(of: folder) == before)
        }
    }

    // MARK: sealed files

    @Test func aSealedConversationGoesOnWithItsKeyOnly() throws {
        let folder = folder(), model = try model(), key = H2OSeal { MixedBytes(7, $0) }
        defer { try? FileManager.default.removeItem(at: folder) }
        var sealed = try kept(folder)
        sealed.spill?.seal = key
        var url: URL?
        do { url = try H2OSpill.recordState(of: begun(model, sealed)) }
        let place = try #require(url), before = try contents(of: folder)
        for wrong in [
            nil, H2OSeal { MixedBytes(8, $0) },
            H2OSeal { _ in throw CocoaError(.coderInvalidValue) },
        ] {
            #expect(throws: H2OError.self) {
                try H2OSpill.resumedCaches(from: place, for: model, seal: wrong)
            }
            #expect(try contents(of: folder) == before)
        }
        let plain = self.folder()
        defer { try? FileManager.default.removeItem(at: plain) }
        let open = try begun(model, kept(plain))
        let caches = try H2OSpill.resumedCaches(from: place, for: model, seal: key)
        let known = caches[0].offset
        #expect(known == open[0].offset)
        let more = known ..< known + 40
        #expect(same(logits(model, caches, more), logits(model, open, more)))
        #expect(caches.allSatisfy { ($0 as! H2OKVCache).spillFailure == nil })
    }

    @Test func aSealThatFailsEndsTheFileAndNothingElse() throws {
        let folder = folder(), model = try model()
        defer { try? FileManager.default.removeItem(at: folder) }
        var sealed = try kept(folder)
        sealed.spill?.seal = H2OSeal { _ in throw CocoaError(.coderInvalidValue) }
        let caches = try sealed.caches(for: model).map { $0 as! H2OKVCache }
        #expect(try ModelTests.generated(model, caches, prompt: 100, tokens: 20).count == 20)
        #expect(caches.allSatisfy { $0.spillFailure?.contains("could not be made") == true })
        #expect(caches.allSatisfy { $0.failure == nil })
    }

    @Test func aModelOfAnotherDtypeGoesOnWithoutTheFile() throws {
        let folder = folder()
        defer { try? FileManager.default.removeItem(at: folder) }
        var url: URL?
        do { url = try H2OSpill.recordState(of: begun(model(), kept(folder))) }
        let half = try H2OModels.load(folder: GoldenReplay.embeddedModel, dtype: .float16)
        let caches = try H2OSpill.resumedCaches(from: try #require(url), for: half)
        #expect(caches.allSatisfy { ($0 as! H2OKVCache).spillFailure == nil })
        _ = logits(half, caches, 100 ..< 101)
        for cache in caches.map({ $0 as! H2OKVCache }) {
            #expect(cache.failure == nil && cache.spillFailure?.contains("another dtype") == true)
        }
        #expect(try H2OSpill.recordState(of: caches) == nil)
    }

    @Test func cachesWithAnAppsOwnPolicyAreNotResumed() throws {
        let folder = folder()
        defer { try? FileManager.default.removeItem(at: folder) }
        var configuration = try kept(folder), url: URL?
        configuration.policy = H2OPolicies.Own(name: "summed") { $0.scores! }
        do { url = try H2OSpill.recordState(of: begun(model(), configuration)) }
        expectRefusal(try #require(url), try model(), "policy")
    }

    @Test func aRecordIsOfAllCachesOfOneFile() throws {
        let folder = folder()
        defer { try? FileManager.default.removeItem(at: folder) }
        let model = try model()
        let caches = try begun(model, kept(folder)), others = try begun(model, kept(folder))
        let without = try begun(model, H2OConfiguration(budget: .tokens(48)))
        let copies = caches.map { $0.copy() }
        for wrong in [
            [caches[0]] + others.dropFirst(), without, copies, [], caches + [KVCacheSimple()],
            Array(caches.dropLast()), caches.reversed(),
        ] {
            #expect(throws: H2OError.self) { try H2OSpill.recordState(of: wrong) }
        }
        #expect(try H2OSpill.recordState(of: caches) != nil)
    }
}

/// No cipher, but bytes that look like none: mixed with a key, with a tag that tells changes.
private struct MixedBytes: H2OFileCipher {
    let key: Data

    init(_ key: UInt8, _ salt: Data) { self.key = Data(salt.map { $0 &+ key }) }

    private func mixed(_ bytes: Data, _ nonce: Data) -> Data {
        let (key, nonce) = ([UInt8](self.key), [UInt8](nonce))
        return Data(
            bytes.enumerated().map {
                $1
                    ^ (key[$0 % key.count] &+ nonce[$0 % nonce.count]
                        &+ UInt8(truncatingIfNeeded: $0 >> 5))
            })
    }

    private func tag(_ parts: Data...) -> Data {
        var sums: [UInt64] = [1, 2]
        for (i, byte) in parts.joined().enumerated() {
            sums[i % 2] = sums[i % 2] &* 31 &+ UInt64(byte)
        }
        return sums.withUnsafeBytes { Data($0) }
    }

    func seal(_ bytes: Data, nonce: Data, authenticating: Data) -> (bytes: Data, tag: Data) {
        let sealed = mixed(bytes, nonce)
        return (sealed, tag(key, nonce, authenticating, sealed))
    }

    func open(_ bytes: Data, tag: Data, nonce: Data, authenticating: Data) throws -> Data {
        guard tag == self.tag(key, nonce, authenticating, bytes) else {
            throw CocoaError(.fileReadCorruptFile)
        }
        return mixed(bytes, nonce)
    }
}
