import Foundation
import MLX
import Testing

@testable import MLXH2O

/// Profiles of version 2. The fixture, and what is expected of it, are Python's.
@Suite struct ProfileTests {
    private static let file = checkout.appendingPathComponent(
        "swift/Tests/MLXH2OTests/Fixtures/profile.json")

    private func profile() throws -> H2OProfile { try H2OProfile(contentsOf: Self.file) }

    @Test func budgetsAndSaturationsAreThoseOfPython() throws {
        let profile = try profile()
        for (mean, budgets, saturations) in Self.expected {
            #expect(try profile.budgets(mean: mean) == budgets, "\(mean)")
            let actual = profile.saturations(of: budgets, policy: H2OPolicies.Salient())
            #expect(actual == saturations, "\(mean)")
            #expect(profile.saturations(of: budgets, policy: H2OPolicies.Distinct()) == nil)
        }
        #expect(throws: H2OError.self) { try profile.budgets(mean: 11) }
    }

    /// As Python's Profile.budgets and Profile.saturation give them.
    private static let expected: [(Int, [[Int]], [[Float]])] = [
        (14, [[24, 12], [12, 12], [12, 12]], [[0, 0], [4, 4], [0, 4]]),
        (20, [[48, 16], [16, 12], [12, 16]], [[4, 4], [0, 4], [0, 4]]),
        (48, [[96, 48], [16, 12], [24, 92]], [[4, 0], [0, 4], [0, 4]]),
        (60, [[120, 60], [20, 15], [30, 115]], [[4, 0], [4, 0], [4, 4]]),
        (100, [[201, 100], [33, 25], [50, 191]], [[4, 0], [0, 4], [4, 4]]),
        (1001, [[2003, 1001], [333, 250], [500, 1919]], [[4, 0], [0, 4], [4, 4]]),
    ]

    @Test func lossesAndSharesOfShortConversationsAreThoseOfPython() throws {
        let profile = try profile()
        for (mean, length, budgets) in [
            (14, 30, [[12, 12], [20, 12], [16, 12]]), (20, 48, [[12, 16], [12, 48], [12, 20]]),
            (48, 64, [[16, 16], [64, 64], [64, 64]]), (48, 96, [[96, 48], [16, 12], [24, 92]]),
            (48, 200, [[96, 48], [16, 12], [24, 92]]), (48, 47, [[48, 48], [48, 48], [48, 48]]),
        ] {
            #expect(try profile.budgets(mean: mean, length: length) == budgets, "\(mean) \(length)")
        }
        for (mean, bits, context, expected) in [
            (20, nil, 64, 3.0983), (20, 6, 64, 3.0983), (60, nil, 400, 17.5), (14, nil, 1000, 21.5),
        ] as [(Int, Int?, Int, Double)] {
            let loss = try profile.loss(mean: mean, least: 12, bits: bits, context: context)
            #expect(abs(loss! - expected) < 1e-9, "\(mean) \(context)")
        }
        #expect(try profile.loss(mean: 20, least: 12, bits: 8, context: 64) == nil)
    }

    @Test func framesAreForTheNextContextUp() throws {
        let profile = try profile()
        func expect(_ actual: [Float], _ expected: [Float]) {
            #expect(zip(actual.prefix(3), expected).allSatisfy { abs($0 - $1) < 1e-3 })
        }
        expect(profile.frames(context: 512)![1].centre[0], [-1.54, 0.62, -0.35])
        expect(profile.frames(context: 513)![1].scale[1], [0.83, 0.84, 0.61])
        expect(profile.frames(context: 9999)![0].centre[0], [2.18, -1.39, -1.08])
        #expect(profile.frames(context: 1) == profile.frames(context: 512))
        #expect(profile.frames(context: 513) == profile.frames(context: 99_999))
    }

    @Test func versionOneHasNeither() throws {
        let folder = GoldenReplay.embeddedModel
        var json = try H2OSettingValue(
            parsing: String(
                contentsOf: folder.appendingPathComponent(H2OProfile.fileName), encoding: .utf8)
        ).object!
        json["version"] = .int(1)
        let profile = try H2OProfile(.object(json))
        #expect(profile.frames(context: 512) == nil)
        let budgets = try profile.budgets(mean: 94)
        #expect(profile.saturations(of: budgets, policy: H2OPolicies.Salient()) == nil)
        json["version"] = .int(3)
        #expect(throws: H2OError.self) { try H2OProfile(.object(json)) }
    }

    /// A configuration takes from its profile what its caches can use.
    @Test func configurationsTakeWhatTheProfileHas() throws {
        let profile = try profile(), model = try ModelTests.own()
        func caches(
            _ packing: H2OPacking, policy: any H2OPolicy = H2OPolicies.Salient(),
            frames: H2OConfiguration.Frames = .profile, context: Int = 4096,
            saturation: Float? = nil
        ) throws -> [H2OKVCache] {
            try H2OConfiguration(
                budget: .tokens(60), policy: policy, headBudgets: .profile(profile),
                packing: packing, frames: frames, context: context, saturation: saturation
            ).caches(for: model).map { $0 as! H2OKVCache }
        }
        let packed = try H2OPacking(keyBits: 6, valueBits: 6, groupSize: 32)
        let all = try caches(packed)
        let budgets = all.map { $0.settings.filling.last!.budgets }
        #expect(all.map(\.frame) == profile.frames(context: 4096)!)
        #expect(
            all.map(\.saturation)
                == profile.saturations(of: budgets, policy: H2OPolicies.Salient())!)
        #expect(try caches(.dense).allSatisfy { $0.frame == nil })
        #expect(try caches(packed, frames: .none).allSatisfy { $0.frame == nil })
        #expect(try caches(packed, saturation: 2).allSatisfy { $0.saturation == [2] })
        // Its orders are of another policy; its frames are the keys' own.
        let other = try caches(packed, policy: H2OPolicies.H2O())
        #expect(other.allSatisfy { $0.saturation == [4] && $0.frame != nil })
        #expect(throws: H2OError.self) { try caches(packed, context: 0) }
        #expect(throws: H2OError.self) { try caches(packed, saturation: -1) }
        _ = try ModelTests.generated(model, all, tokens: 40)
        #expect(all.allSatisfy { $0.evicted > 0 })
    }

    @Test func damagedOnesAreRefused() throws {
        let whole = try H2OSettingValue(parsing: String(contentsOf: Self.file, encoding: .utf8))
        _ = try H2OProfile(whole)
        let measured = whole["measured"]!.object!, errors = measured["errors"]!.object!
        func frames(_ value: H2OSettingValue) -> H2OSettingValue { .object(["512": value]) }
        let frame = measured["frames"]!["512"]!.array![0]
        let wrong: [(String, H2OSettingValue?)] = [
            ("orders", nil), ("orders", .array([])), ("orders", .array([.int(0), .int(-1)])),
            ("spans", .array([.int(96), .int(32)])), ("spans", .array([.int(32)])),
            ("errors", .null), ("packing", .object(["6": .null])), ("policy", .null),
            ("frames", .null),
            ("errors", .object(errors.merging(["data": .string("AAAA")]) { $1 })),
            ("errors", .object(errors.merging(["dtype": .string("float64")]) { $1 })),
            ("frames", frames(.array([frame]))), ("frames", frames(.null)),
            ("frames", .object(["none": .array([frame, frame, frame])])),
        ]
        for (name, value) in wrong {
            var changed = measured
            changed[name] = value
            var json = whole.object!
            json["measured"] = .object(changed)
            #expect(throws: H2OError.self, "\(name)") { try H2OProfile(.object(json)) }
        }
    }
}
