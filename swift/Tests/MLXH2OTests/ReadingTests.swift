import Foundation
import MLX
import MLXLMCommon
import Testing

@testable import MLXH2O

/// Prompts that are read twice. That the rows kept are Python's, the golden groups "twice" and "model" say.
@Suite(.serialized) struct ReadingTests {
    private let prompt = (0 ..< 70).map { ($0 * 37 + 11) % 128 }, request = [3, 1, 4]

    private func caches(
        _ model: any LanguageModel, _ slots: Int = 40, _ pressure: H2OMemoryPressure? = nil
    ) throws -> [H2OKVCache] {
        try H2OConfiguration(budget: .tokens(slots), pressure: pressure).caches(for: model)
            .map { $0 as! H2OKVCache }
    }

    private func slots(_ caches: [H2OKVCache]) -> Int {
        caches.reduce(0) { $0 + $1.budgets!.reduce(0, +) }
    }

    private func goesOn(_ model: any LanguageModel, _ caches: [H2OKVCache]) throws {
        for token in 0 ..< 24 {
            let logits = model(MLXArray([Int32(token)], [1, 1]), cache: caches)
            #expect(logits.asArray(Float.self).allSatisfy { $0.isFinite })
        }
        for cache in caches { #expect(cache.physicalLength <= cache.budgets!.max()!) }
    }

    @Test func onlyWhatTheMemoryDoesNotHoldIsReadTwice() throws {
        let model = try ModelTests.own()
        for (how, size, count) in [
            (H2OReading.twice, 40, 54), (.auto, 40, 54), (.once, 40, 0), (.twice, 80, 0),
        ] {
            let caches = try caches(model, size), bound = slots(caches)
            var counts: [Int] = []
            let done = try how.read(
                prompt, by: model, into: caches, request: request, chunk: 20,
                progress: { counts += [$0, $1] })
            #expect(done == (count, count == 0 ? 1 : 2))
            #expect(caches.allSatisfy { $0.offset == count && $0.physicalLength <= 64 })
            #expect(
                counts.isEmpty ? count == 0 : Array(counts.suffix(2)) == [2 * count, 2 * count])
            #expect(slots(caches) <= bound)
            try goesOn(model, caches)
        }
    }

    /// Rows of the first reading; of the second one nothing but what it looked at.
    @Test func nothingOfTheSecondReadingIsStored() throws {
        let model = try ModelTests.own(), caches = try caches(model)
        let readings = try EngineReadings(caches.map { $0.engine! }, length: 70, room: 4)
        let tokens = MLXArray(prompt.map { Int32($0) })[.newAxis]
        eval(model(tokens, cache: caches))
        let bytes = caches.map(\.nbytes)
        eval(model(tokens, cache: secondReadingCaches(of: caches, readings)))
        #expect(caches.map(\.nbytes) == bytes)
        #expect(caches.allSatisfy { $0.offset == 70 && $0.physicalLength == 70 })
        try readings.abandon()
        #expect(caches.allSatisfy { $0.physicalLength <= 40 })
    }

    /// A task that is cancelled, and a host that fails, in the first reading and in the second.
    @Test(arguments: [1, 4, 6]) func whatStopsLeavesTheCachesWithinTheirBound(
        _ chunk: Int
    ) async throws {
        struct Failure: Error {}
        let model = try ModelTests.own(), prompt = prompt, request = request
        for fails in [true, false] {
            let caches = try caches(model), before = caches.map { $0.budgets! }
            var count = 0
            func read() throws {
                try H2OReading.twice.read(
                    prompt, into: caches, request: request, chunk: 20,
                    progress: { _, _ in
                        count += 1
                        if count == chunk && !fails { withUnsafeCurrentTask { $0?.cancel() } }
                    },
                    forward: {
                        if count == chunk && fails { throw Failure() }
                        _ = model($0, cache: $1)
                    })
            }
            let stopped = UncheckedSendable(read)
            let result = await Task { try stopped.value() }.result
            if fails, chunk < 6 {
                #expect(throws: Failure.self) { try result.get() }
            } else if !fails {
                #expect(throws: CancellationError.self) { try result.get() }
            } else {
                try result.get()
                continue
            }
            #expect(caches.map { $0.budgets! } == before)
            #expect(caches.allSatisfy { $0.offset == min(20 * chunk, 54) })
            try goesOn(model, caches)
        }
    }

    @Test func autoReadsOnceWhereTwiceCannotBe() throws {
        let own = try ModelTests.own(), stock = try ModelTests.stock()
        let long = Array(repeating: 5, count: H2OReading.longest + H2OReading.newest + 1)
        let small = try caches(own, 17), attendsNot = try caches(stock), enough = try caches(own)
        let cases: [([H2OKVCache], any LanguageModel, [Int])] = [
            (small, own, prompt), (attendsNot, stock, prompt), (enough, own, long),
        ]
        for (caches, model, tokens) in cases {
            let before = caches.map { $0.budgets! }
            let done = try H2OReading.auto.read(tokens, by: model, into: caches, request: request)
            #expect(done == (0, 1) && caches.allSatisfy { $0.offset == 0 })
            #expect(caches.map { $0.budgets! } == before)
        }
        for (caches, model, tokens) in cases.dropLast() {
            #expect(throws: H2OError.self) {
                try H2OReading.twice.read(tokens, by: model, into: caches, request: request)
            }
            #expect(caches.allSatisfy { $0.offset == 0 })
        }
        #expect(throws: H2OError.self) {
            try H2OReading.twice.read(prompt, by: own, into: enough, request: request, chunk: 0)
        }
    }

    /// A host that changes a cache in between.
    @Test func cachesThatWereChangedAreBackWithinTheirBound() throws {
        let model = try ModelTests.own(), caches = try caches(model)
        let before = caches.map { $0.budgets! }
        #expect(throws: H2OError.self) {
            try H2OReading.twice.read(
                prompt, by: model, into: caches, request: request, chunk: 20,
                progress: { done, all in if done == all { try! caches[1].resize([20]) } })
        }
        #expect(caches.map { $0.budgets! } == before)
        try goesOn(model, caches)
    }

    @Test func autoStopsBeforeASecondReadingThatTakesTooLong() throws {
        let model = try ModelTests.own(), caches = try caches(model)
        let before = caches.map { $0.budgets! }
        var counts = 0
        let done = try H2OReading.auto.read(
            prompt, into: caches, request: request, chunk: 20, seconds: 0,
            progress: { counts = $0 + $1 }, forward: { _ = model($0, cache: $1) })
        #expect(done == (54, 1) && counts == 4 * 54)
        #expect(caches.map { $0.budgets! } == before)
        #expect(caches.allSatisfy { $0.offset == 54 })
        try goesOn(model, caches)
    }

    /// Caches of other kinds go on from the first reading, as copies.
    @Test func otherCachesGoOnFromTheFirstReading() throws {
        let model = try ModelTests.own(), bounded = try caches(model)
        let plain = KVCacheSimple(), inner = KVCacheSimple()
        let list = CacheList(inner, bounded[1])
        let rows = MLXArray.zeros([1, 2, 5, 32])
        for cache in [plain, inner] { _ = cache.update(keys: rows, values: rows) }
        let readings = try EngineReadings(
            bounded[..<2].map { $0.engine! }, length: 70, room: 4)
        let again = secondReadingCaches(of: [bounded[0], plain, list], readings)
        #expect(again[0] is SecondReadingCache)
        let members = placedMembers(of: [again[2]]).map(\.cache)
        #expect(members[1] is SecondReadingCache && list[1] is H2OKVCache)
        for (copy, own) in [(again[1], plain), (members[0], inner)] {
            #expect(copy.offset == 5)
            _ = copy.update(keys: rows, values: rows)
            #expect(copy.offset == 10 && own.offset == 5)
        }
        try readings.abandon()
    }

    /// It waits until the readings are over, and is obeyed then.
    @Test func memoryPressureIsObeyedAfterwards() throws {
        let pressure = H2OMemoryPressure(), model = try ModelTests.own()
        let caches = try caches(model, 40, pressure), bound = slots(caches)
        try H2OReading.twice.read(
            prompt, by: model, into: caches, request: request, chunk: 20,
            progress: { done, _ in if done == 20 { try! pressure.lower(toFraction: 0.5) } })
        #expect(caches.allSatisfy { $0.offset == 54 })
        #expect(slots(caches) > bound / 2)
        try goesOn(model, caches)
        #expect(slots(caches) <= bound / 2)
    }

    /// What was saved in another dtype than the model's is read in the model's.
    @Test func restoredCachesOfAnotherDTypeReadTwice() throws {
        let model = try ModelTests.own(), caches = try caches(model)
        eval(model(MLXArray([1, 2, 3, 4, 5] as [Int32], [1, 5]), cache: caches))
        for cache in caches {
            let saved = try cache.saved()
            let halves = saved.arrays.mapValues { $0.dtype == .float32 ? $0.asType(.float16) : $0 }
            var arrays = halves
            for (name, array) in saved.arrays where !["slots.keys", "slots.values"].contains(name) {
                arrays[name] = array
            }
            try cache.restore(Engine.Saved(arrays: arrays, settings: saved.settings))
        }
        let bound = slots(caches)
        let done = try H2OReading.twice.read(
            prompt, by: model, into: caches, request: request)
        #expect(done == (54, 2) && caches.allSatisfy { $0.offset == 59 })
        #expect(slots(caches) <= bound)
        try goesOn(model, caches)
    }

    // MARK: a chat

    private func session(
        _ reading: H2OReading, _ progress: @escaping @Sendable (Int, Int) -> Void = { _, _ in }
    ) throws -> H2OChatSession {
        H2OChatSession(
            try ChatSessionTests().container(), h2o: try H2OConfiguration(budget: .tokens(64)),
            reading: reading, readingProgress: progress,
            parameters: GenerateParameters(
                maxTokens: 8, temperature: 3, prefillStepSize: 32, seed: 5))
    }

    private let document = String(repeating: "the sea was calm and otto had a ship. ", count: 8)

    @Test func aDocumentInAChatIsReadTwice() async throws {
        let reports = Reports()
        let session = try session(.twice) { reports.counts.append($0 * 1000 + $1) }
        _ = try await session.respond(to: document)
        let read = Letters().rendered([.user(document)]).count
        #expect(reports.counts.last == 2 * (read - 16) * 1001)
        #expect(session.caches!.allSatisfy { $0.offset >= read })
        let counts = reports.counts.count
        _ = try await session.respond(to: "who")  // which is short
        #expect(reports.counts.count == counts)
        #expect(slots(session.caches!.map { $0 as! H2OKVCache }) <= 3 * 2 * 64)
        #expect(await session.transcript.contains("otto had a ship"))
    }

    /// A document whose reading is stopped: what was read stays, and the rest is read with the next turn.
    @Test func aChatGoesOnAfterADocumentThatWasStopped() async throws {
        let reports = Reports()
        let session = try session(.twice) { done, _ in
            if done == 64, reports.counts.isEmpty {
                reports.counts.append(done)
                withUnsafeCurrentTask { $0?.cancel() }
            }
        }
        let document = document
        _ = await Task { try await session.respond(to: document) }.result
        #expect(session.caches!.allSatisfy { $0.offset == 64 })
        let whole = await session.transcript
        #expect(whole.contains(document))
        #expect(slots(session.caches!.map { $0 as! H2OKVCache }) <= 3 * 2 * 64)
        _ = try await session.respond(to: "who")
        let after = await session.transcript
        #expect(after.hasPrefix(whole) && after.contains("who"))
        #expect(session.caches!.allSatisfy { $0.offset > Letters().encode(text: document).count })
    }
}

/// What runs in a task alone.
private struct UncheckedSendable<Value>: @unchecked Sendable {
    let value: Value

    init(_ value: Value) { self.value = value }
}

/// The numbers of tokens that a reading reported.
private final class Reports: @unchecked Sendable {
    var counts: [Int] = []
}
