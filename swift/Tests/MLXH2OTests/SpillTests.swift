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
                #expect(caches.allSatisfy { $0.spillFailure == nil && $0.rowsReturned > 0 })
            }
            #expect(files(in: folder).count == 2)
        }
        #expect(files(in: folder).isEmpty)
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
}
