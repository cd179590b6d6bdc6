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
        (try? FileManager.default.contentsOfDirectory(atPath: folder.path)) ?? []
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
                        [24, 32], policy: H2OPolicies.Salient(), remainder: true,
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
            // The file is there, and has no name.
            #expect(FileManager.default.fileExists(atPath: folder.path))
            #expect(files(in: folder).isEmpty)
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
            #expect(both[0].last!.file!.spill !== both[1].last!.file!.spill)
        }
        #expect(files(in: folder).isEmpty)
    }

    @Test func aFileHasTheLayersToWhichRowsComeBack() throws {
        let folder = folder(), model = try model()
        defer { try? FileManager.default.removeItem(at: folder) }
        let profile = try H2OProfile(
            contentsOf: GoldenReplay.embeddedModel.appendingPathComponent(H2OProfile.fileName))
        let configuration = try H2OConfiguration(
            budget: .tokens(48), headBudgets: .profile(profile), spill: often(folder))
        let caches = try configuration.caches(for: model).map { $0 as! H2OKVCache }
        #expect(try ModelTests.generated(model, caches, prompt: 200, tokens: 40).count == 40)
        #expect(caches.map { $0.file != nil } == [false, false, false, true])
        #expect(caches[3].spillFailure == nil && caches[3].rowsReturned > 0)
    }

    /// Facts come back, so slots are bought for prose first.
    @Test func whereRowsComeBackTheLossOverEchoesCountsLess() throws {
        let folder = folder(), model = try model()
        defer { try? FileManager.default.removeItem(at: folder) }
        let profile = try H2OProfile(
            contentsOf: GoldenReplay.embeddedModel.appendingPathComponent(H2OProfile.fileName))
        func shares(_ spill: H2OSpill?) throws -> (mean: Int, budgets: [[Int]]) {
            let configuration = try H2OConfiguration(
                budget: .tokens(180), headBudgets: .profile(profile), spill: spill)
            let plans = try configuration.caches(for: model).map { ($0 as! H2OKVCache).settings }
            return (plans[0].filling[0].beyond, plans.map { $0.filling.last!.budgets })
        }
        let least = H2OPolicies.Salient().leastBudget + H2OConfiguration.fewestChoices
        let back = try shares(often(folder)), never = try shares(nil)
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
        let ways: [(H2OConfiguration.HeadBudgets, Int)] = [
            (.uniform, 150_000), (.profile(profile), 60_000),
        ]
        for (shares, bytes) in ways {
            let folder = folder()
            defer { try? FileManager.default.removeItem(at: folder) }
            var configuration = try H2OConfiguration(
                budget: .bytes(bytes), headBudgets: shares, spill: often(folder))
            let caches = try configuration.caches(for: model).map { $0 as! H2OKVCache }
            var most = 0
            for tokens in [400, 400] + ones(80) {
                let prompt = MLXArray((0 ..< tokens).map { Int32(($0 * $0 * 31 + most) % 199 + 3) })
                eval(model(prompt[.newAxis], cache: caches))
                most = max(most, caches.reduce(0) { $0 + $1.nbytes })
            }
            #expect(caches.contains { $0.rowsReturned > 0 })
            #expect(caches.allSatisfy { $0.spillFailure == nil })
            #expect(most <= bytes, "\(shares)")
            // Rows wait for the disk in fewer bytes than there is room for.
            #expect(Double(most) >= 0.6 * Double(bytes), "\(shares)")
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
            { try H2OSpill(rows: 0) }, { try H2OSpill(room: 0) }, { try H2OSpill(room: 1.5) },
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

    private func model() throws -> any LanguageModel {
        try H2OModels.load(folder: GoldenReplay.embeddedModel, dtype: .float32)
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

    /// What was set by hand is no longer the file's.
    @Test func aStateThatIsSetLeavesTheFile() throws {
        let folder = folder(), model = try model()
        defer { try? FileManager.default.removeItem(at: folder) }
        let configuration = try H2OConfiguration(budget: .tokens(48), spill: often(folder))
        let cache = try begun(model, configuration)[0] as! H2OKVCache
        #expect(cache.spillFailure == nil)
        let names = cache.metaState, state = cache.state
        (cache.state, cache.metaState) = (state, names)
        #expect(cache.failure == nil && cache.spillFailure?.contains("state was set") == true)
    }

    @Test func rowsOfAnotherDtypeLeaveTheFile() throws {
        let folder = folder()
        defer { try? FileManager.default.removeItem(at: folder) }
        let configuration = try H2OConfiguration(budget: .tokens(48), spill: often(folder))
        let caches = try begun(model(), configuration)
        let half = try H2OModels.load(folder: GoldenReplay.embeddedModel, dtype: .float16)
        _ = logits(half, caches, 100 ..< 101)
        for cache in caches.map({ $0 as! H2OKVCache }) {
            #expect(cache.failure == nil && cache.spillFailure?.contains("another dtype") == true)
        }
    }
}
