import Foundation
import MLX
import MLXLMCommon
import Testing

@testable import MLXH2O

/// Sizes in bytes: nothing goes before the memory is full, and it is never exceeded.
@Suite(.serialized) struct FillingTests {
    private static let fixtures = checkout.appendingPathComponent(
        "swift/Tests/MLXH2OTests/Fixtures")
    /// Of ``ModelTests/own(_:)``.
    private static let profile = fixtures.appendingPathComponent("profile.json")
    /// One layer of two heads, 40 slots each on average.
    private static let stages = [
        Stage(beyond: 40, budgets: [60, 20]), Stage(beyond: 80, budgets: [52, 28]),
        Stage(beyond: 160, budgets: [24, 56]),
    ]
    private static let policy = H2OPolicies.Distinct().with {
        ($0.sink, $0.recent) = (2, .count(2))
    }

    private func settings(
        _ filling: [Stage] = stages, policy: any H2OPolicy = policy, packing: H2OPacking = .dense,
        undo: Int = 0, attends: Bool = true
    ) throws -> CacheSettings {
        try CacheSettings(
            [40, 40], policy: policy, remainder: true, attends: attends, packing: packing,
            undo: undo, filling: filling)
    }

    private func cache(
        policy: any H2OPolicy = policy, packing: H2OPacking = .dense,
        pressure: H2OMemoryPressure? = nil
    ) throws -> H2OKVCache {
        try H2OKVCache(
            settings(policy: policy, packing: packing), PressureShare(pressure, nil))
    }

    /// The slots of a conversation of so many tokens.
    private func due(_ first: [Int], _ stages: [Stage], _ tokens: Int) -> [Int] {
        stages.last { $0.beyond < tokens }?.budgets ?? first
    }

    /// Every head within its slots, and what it lost in its remainder.
    private func expectWhole(_ cache: H2OKVCache, _ comment: Comment) {
        let counts = try! cache.keptPositions()[0].map(\.count)
        #expect(zip(counts, cache.budgets!).allSatisfy { $0 <= $1 }, comment)
        let folded = try! cache.evictedRemainder!.count.asArray(Float.self)
        #expect(zip(counts, folded).allSatisfy { Float($0) + $1 == Float(cache.offset) }, comment)
    }

    /// Sinks count once: two of the ten pinned tokens are among them.
    @Test func aProfileLeavesEveryLayerRoomForItsPins() throws {
        let policy = H2OPolicies.Salient()
        let configuration = try H2OConfiguration(
            budget: .tokens(40), policy: policy, pins: .positions([0 ..< 2, 20 ..< 28]))
        let needed = policy.leastBudget(pinned: 8) + H2OConfiguration.fewestChoices
        #expect(configuration.leastBesidePins(mean: 36, policy) == needed)
        #expect(configuration.leastBesidePins(mean: needed - 2, policy) == needed - 2)
        let plain = policy.leastBudget + H2OConfiguration.fewestChoices
        #expect(H2OConfiguration.default.leastBesidePins(mean: 36, policy) == plain)
    }

    /// A model's caches step by step, by the profile: exact while all heads' tokens fit.
    @Test func nothingGoesBeforeTheBytesAreFull() throws {
        let profile = try H2OProfile(contentsOf: Self.profile), model = try ModelTests.own()
        for (policy, packing, bytes) in [
            (H2OPolicies.Salient(), .dense, 70_000),
            (H2OPolicies.H2O(), try H2OPacking(keyBits: 8, valueBits: 4, groupSize: 32), 25_000),
            (H2OPolicies.Salient(), CacheTests.stores[2].packing, 40_000),
        ] as [(any H2OPolicy, H2OPacking, Int)] {
            let configuration = try H2OConfiguration(
                budget: .bytes(bytes), policy: policy, headBudgets: .profile(profile),
                packing: packing)
            let caches = try configuration.caches(for: model).map { $0 as! H2OKVCache }
            let mean = caches[0].budgets![0], name: Comment = "\(type(of: policy))\(packing)"
            let plans = caches.map { $0.settings.filling }
            #expect(caches.allSatisfy { $0.budgets == [mean, mean] && $0.maxSize == mean }, name)
            #expect(plans.allSatisfy { $0.map(\.beyond).starts(with: [mean, 2 * mean]) }, name)
            let rows = caches.indices.map { RowStream(seed: $0 + 1, tokens: 6 * mean) }
            let full = try caches.map {
                try H2OKVCache(
                    [200, 200], policy: policy, packing: packing, frame: $0.frame)
            }
            for length in [mean - 2] + ones(4) + [9, mean - 12] + ones(4) + [mean, mean + 5, 1] {
                for (layer, cache) in caches.enumerated() {
                    let output = rows[layer].run(cache, [length])
                    if cache.offset <= mean {
                        #expect(cache.evicted == 0, name)
                        let exact = rows[layer].run(full[layer], [length])
                        // A larger cache has more of its tokens in the recent window's width.
                        let isExact = allClose(output, exact, atol: 1e-5).item(Bool.self)
                        #expect(isExact || packing.recentBits != nil, name)
                    }
                    #expect(cache.budgets == due([mean, mean], plans[layer], cache.offset), name)
                    #expect(cache.maxSize == mean, name)
                    expectWhole(cache, name)
                }
                #expect(caches.reduce(0) { $0 + $1.nbytes } <= bytes, name)
            }
            #expect(caches.allSatisfy { $0.evicted > 0 }, name)
            // The next conversation, after clear() too, is whole again.
            let next = try configuration.caches(for: model).map { $0 as! H2OKVCache }
            #expect(next.map { $0.settings.filling } == plans, name)
            #expect(next.map { $0.budgets! } == caches.map { _ in [mean, mean] }, name)
        }
    }

    /// The shares of the embedded model's profile and of the fixture's, as Python wrote them
    /// (tools/record_caches.py).
    @Test func stagesAreThoseOfPython() throws {
        let file = Self.fixtures.appendingPathComponent("stages.json")
        let recorded = try H2OSettingValue(parsing: String(contentsOf: file, encoding: .utf8))
            .array!
        #expect(recorded.count > 5)
        for one in recorded {
            let profile = try H2OProfile(
                contentsOf: checkout.appendingPathComponent(one["profile"]!.string!))
            let stages = try profile.stages(
                mean: one["mean"]!.int!, least: one["least"]!.int!)
            let actual = H2OSettingValue.array(
                stages.map { beyond, budgets in
                    .array([
                        .int(beyond), .array(budgets.map { .array($0.map { .int($0) }) }),
                    ])
                })
            #expect(actual == one["stages"]!, "\(one["mean"]!.int!)")
        }
    }

    /// A size whose steps can be taken back is shared out at once; one in tokens is filled as one in bytes.
    @Test func whatIsSharedOutAtOnce() throws {
        let profile = try H2OProfile(contentsOf: Self.profile), model = try ModelTests.own()
        func plans(
            _ budget: H2OConfiguration.Budget, undo: Int = 0,
            _ heads: H2OConfiguration.HeadBudgets? = nil,
            policy: any H2OPolicy = H2OPolicies.Salient()
        ) throws -> [SlotPlan] {
            try H2OConfiguration(
                budget: budget, policy: policy, headBudgets: heads ?? .profile(profile),
                packing: .dense, undo: undo
            ).caches(for: model).map {
                let cache = $0 as! H2OKVCache
                return SlotPlan(budgets: cache.budgets!, later: cache.settings.filling)
            }
        }
        let byLayer = H2OPolicies.Salient().with { $0.unit = .layer }
        for atOnce in [
            try plans(.tokens(60), undo: 3), try plans(.bytes(90_000), undo: 3),
            try plans(.bytes(90_000), .uniform), try plans(.bytes(90_000), policy: byLayer),
        ] {
            #expect(atOnce.allSatisfy { $0.later.allSatisfy { $0.beyond == Limits.fewPositions } })
        }
        let least = H2OPolicies.Salient().leastBudget + H2OConfiguration.fewestChoices
        func shared(_ mean: Int) throws -> [[Int]] {
            try profile.budgets(mean: mean, least: least)
        }
        let tokens = try plans(.tokens(60)), each = tokens[0].budgets[0]
        #expect(tokens.allSatisfy { $0.budgets.allSatisfy { $0 == each } })
        #expect(tokens.allSatisfy { $0.later[0].beyond == each })
        #expect(try tokens.map { $0.later.last!.budgets } == shared(each))
        #expect(try plans(.tokens(1 << 30)).allSatisfy { $0.later.isEmpty })
        let filled = try plans(.bytes(90_000)), mean = filled[0].budgets[0]
        let narrow = filled.map { $0.later.last { $0.beyond < Limits.fewPositions }!.budgets }
        #expect(try narrow == shared(mean))
        let atOnce = try plans(.bytes(90_000), undo: 3).map(\.budgets), slots = atOnce.joined()
        #expect(Set(slots).count > 1)
        #expect(try atOnce == shared(slots.reduce(0, +) / slots.count))
    }

    @Test(arguments: [20, 40, 55, 130]) func copiesAndFilesGoThroughTheSameStages(
        after: Int
    ) throws {
        let file = temporaryFile()
        defer { try? FileManager.default.removeItem(at: file) }
        for (name, packing) in CacheTests.stores {
            let rows = RowStream(tokens: 260), cache = try cache(packing: packing)
            rows.run(cache, [after - 4] + ones(4))
            let filling = cache.settings.filling
            try H2OKVCache.saveCaches([cache], to: file)
            let loaded = try H2OKVCache.loadedCaches(from: file).caches[0] as! H2OKVCache
            let restored = try self.cache(packing: packing)
            restored.state = cache.state
            restored.metaState = cache.metaState
            let twins = [loaded, restored, cache.copy() as! H2OKVCache]
            let lengths = ones(3) + [30] + ones(3) + [180 - after] + ones(3)
            let expected = rows.run(cache, lengths)
            for twin in twins {
                #expect(twin.settings.filling == filling, "\(name)")
                let output = rows.run(twin, lengths)
                #expect(allClose(output, expected, atol: 1e-5).item(Bool.self), "\(name)")
                #expect(try twin.keptPositions() == cache.keptPositions(), "\(name)")
                #expect(twin.budgets == [24, 56] && twin.settings.filling.isEmpty, "\(name)")
            }
        }
    }

    /// A prompt that is longer than the memory goes to its stage at once; resizing ends them all.
    @Test func stagesAreSkippedAndEnd() throws {
        let rows = RowStream(tokens: 200)
        let prompt = try cache()
        rows.run(prompt, [100])
        #expect(prompt.budgets == [52, 28])
        expectWhole(prompt, "prompt")
        // One that fills it does not.
        let filling = try cache()
        rows.run(filling, [40])
        #expect(filling.budgets == [40, 40] && filling.evicted == 0)
        let resized = try cache()
        rows.run(resized, [30])
        try resized.resize([30, 30])
        rows.run(resized, [100])
        #expect(resized.budgets == [30, 30] && resized.settings.filling.isEmpty)
        // Before anything was lost steps are taken back, and the stages stay.
        let trimmed = try cache()
        rows.run(trimmed, [38, 1, 1])
        #expect(trimmed.isTrimmable(after: 0) && !trimmed.isTrimmable(after: 1))
        #expect(trimmed.trim(20) == 20)
        rows.run(trimmed, ones(20))
        #expect(trimmed.evicted == 0)
        rows.run(trimmed, [1])
        #expect(
            try trimmed.budgets == [60, 20] && trimmed.keptPositions()[0].map(\.count) == [41, 20])
        // The state of an empty cache brings the beginning back.
        let empty = try cache()
        prompt.state = empty.state
        prompt.metaState = empty.metaState
        #expect(prompt.budgets == [40, 40])
        #expect(same(rows.run(prompt, [30] + ones(20)), rows.run(empty, [30] + ones(20))))
        #expect(try prompt.keptPositions() == empty.keptPositions())
    }

    /// Lowered budgets are shared out in stages that begin as much earlier.
    @Test(arguments: [0, 30, 100]) func pressureLowersEveryStage(after: Int) throws {
        let pressure = H2OMemoryPressure(), rows = RowStream(tokens: 260)
        let cache = try cache(pressure: pressure)
        if after > 0 { rows.run(cache, [after - 3] + ones(3)) }
        let before = cache.nbytes
        try pressure.lower(toFraction: 0.5)
        let halves = Self.stages.map {
            Stage(beyond: $0.beyond / 2, budgets: $0.budgets.map { $0 / 2 })
        }
        for length in [1, 9, 10, 1, 19, 1, 39] + ones(3) + [60] {
            rows.run(cache, [length])
            #expect(cache.budgets == due([20, 20], halves, cache.offset), "\(cache.offset)")
            expectWhole(cache, "\(cache.offset)")
            if after == 0 && cache.offset <= 20 { #expect(cache.evicted == 0) }
            #expect(cache.maxSize == 40)
        }
        if after == 100 { #expect(cache.nbytes < before * 7 / 10) }
        #expect(cache.fullBudgets == [24, 56])
        // Files of a lowered cache hold what it may have, and no more.
        let file = temporaryFile(), early = try self.cache(pressure: pressure)
        defer { try? FileManager.default.removeItem(at: file) }
        rows.run(early, [18])
        try H2OKVCache.saveCaches([early], to: file)
        pressure.end()
        let loaded = try H2OKVCache.loadedCaches(from: file, pressure: pressure).caches[0]
        let twin = loaded as! H2OKVCache
        #expect(twin.budgets == [20, 20] && twin.settings.filling == halves)
        rows.run(twin, [30])
        #expect(twin.budgets == [26, 14])
        // What was given away is not asked back, and a later warning is obeyed.
        try pressure.lower(toFraction: 0.6)
        rows.run(twin, [1])
        #expect(twin.budgets == [9, 16])
        expectWhole(twin, "twin")
    }

    /// However little is asked for, the policy can work.
    @Test func extremePressureLeavesEnough() throws {
        let pressure = H2OMemoryPressure()
        try pressure.lower(toFraction: 1e-9)
        let cache = try cache(pressure: pressure), least = Self.policy.leastBudget + 4
        RowStream(tokens: 90).run(cache, [1, 1] + ones(20) + [60])
        #expect(cache.budgets == [least, least])
        expectWhole(cache, "extreme")
    }

    /// Pins have room at every stage, or nothing is pinned.
    @Test func pinsHaveRoomAtEveryStage() throws {
        let pins = [0 ..< 20], rows = RowStream(tokens: 260)
        for pinnedFirst in [true, false] {
            let cache = try cache()
            if pinnedFirst { try cache.pin(pins) }
            rows.run(cache, [30])
            if !pinnedFirst { try cache.pin(pins) }
            for length in [11, 1, 40, 90] {
                rows.run(cache, [length])
                #expect(cache.budgets!.reduce(0, +) == 80)
                let kept = try cache.keptPositions()[0]
                #expect(kept.allSatisfy { Set(0 ..< 20).isSubset(of: $0) })
                expectWhole(cache, "pins")
            }
            #expect(cache.budgets == [24, 56])
        }
        let few = try cache(), filling = few.settings.filling
        rows.run(few, [30])
        #expect(throws: H2OError.self) { try few.pin([0 ..< 38]) }
        #expect(few.pins.isEmpty && few.settings.filling == filling)
    }

    @Test func whatIsNoFillingIsRefused() throws {
        let stage = { Stage(beyond: $0, budgets: $1) }
        for filling in [
            [stage(80, [60, 20]), stage(40, [60, 20])],
            [stage(40, [60, 20]), stage(40, [60, 20])],
            [stage(0, [60, 20])], [stage(-3, [60, 20])], [stage(.max, [60, 20])],
            [stage(40, [30, 25, 25])], [stage(40, [])], [stage(40, [78, 2])],
            [stage(40, [.max, .max])], (1 ... 65).map { stage($0, [40, 40]) },
        ] {
            #expect(throws: H2OError.self) { try settings(filling).engine() }
        }
        _ = try settings(undo: 2).engine()
        #expect(throws: H2OError.self) {
            try settings(policy: H2OPolicies.Distinct.keysOnly, attends: false).engine()
        }
        let json = try cache().configuration.object!,
            damaged: [H2OSettingValue] = [
                .array([.int(40)]), .array([.array([.int(40)])]),
                .array([.array([.int(40), .int(8)])]),
                .array([.array([.int(40), .array([.double(20.5), .int(20)])])]), .array([.null]),
            ]
        _ = try CacheSettings(.object(json))
        for filling in damaged {
            let changed = json.merging(["filling": filling]) { $1 }
            #expect(throws: H2OError.self) { try CacheSettings(.object(changed)) }
        }
    }
}
