import Foundation
import MLX
import MLXLMCommon
import Testing

@testable import MLXH2O

/// Files that were changed on purpose, digest and all: each is refused, or loaded and run.
@Suite(.serialized) struct FileFuzzTests {
    // More with MLX_H2O_FUZZ=5000 in the environment; `make test` takes few.
    static let mutants =
        ProcessInfo.processInfo.environment["MLX_H2O_FUZZ"].flatMap { Int($0) }
        ?? (isQuick ? 80 : 400)

    /// The issue's own: nothing may hang or take memory by what a header merely says.
    @Test(arguments: [
        "[1,-5,3]", "[1000000000000,1000000000]", "[9223372036854775807,9223372036854775807]",
        "[0,1000000000000]", "[1.5]", "\"x\"", "[[1]]", "[2147483648]",
    ])
    func shapesThatLieAreRefused(shape: String) throws {
        let file = temporaryFile()
        defer { try? FileManager.default.removeItem(at: file) }
        let header = """
            {"0.slots.keys":{"dtype":"F32","shape":\(shape),"data_offsets":[0,4]}}
            """
        try SavedFile.write(Data(header.utf8), Data(count: 4), to: file)
        #expect(throws: H2OError.self) { try H2OKVCache.loadedCaches(from: file) }
    }

    @Test func settingsThatCannotBeAreRefused() throws {
        let file = temporaryFile()
        defer { try? FileManager.default.removeItem(at: file) }
        let saved = try SavedFile(Self.caches()[3])
        for (path, value) in [
            (["recent", "size"], 1_000_000_000_000_000_000), (["policy", "sink"], .max),
            (["policy", "recent"], 1_000_000_000_000_000_000), (["policy", "pool"], 1_000_000_001),
            (["policy", "window"], .max), (["policy", "evict_every"], .max), (["offset"], .max),
            (["offset"], -1), (["runs", "0", "last"], 1_000_000_000_000_000_000),
            (["runs", "0", "length"], .max), (["runs", "0", "budget"], .max),
            (["runs", "0", "start"], -1), (["reserved"], 3), (["recent", "oldest"], 7_000),
        ] as [([String], Int)] {
            var changed = saved
            changed.configuration = changed.configuration.setting(path, to: .int(value))
            try changed.write(to: file)
            #expect(throws: H2OError.self, "\(path) \(value)") {
                try H2OKVCache.loadedCaches(from: file)
            }
        }
        try saved.write(to: file)
        _ = try H2OKVCache.loadedCaches(from: file)
    }

    /// Settings that no file could have come by, with a share that leaves next to nothing.
    @Test(.timeLimit(.minutes(1))) func sharesNextToOneAreCounted() throws {
        var policy = H2OPolicies.H2O()
        policy.options.recent = .share(1 - 1e-15)
        // It would be more than there can be.
        #expect(policy.leastBudget == 1 << 30)
        #expect(throws: H2OError.self) { try H2OKVCache([1 << 20], policy: policy) }
        for share in [0, 0.2, 0.5, 0.9, 0.999] {
            policy.options.recent = .share(share)
            let least = policy.leastBudget
            try policy.checkBudget(least)
            #expect(throws: H2OError.self) { try policy.checkBudget(least - 1) }
        }
    }

    @Test(.timeLimit(.minutes(5))) func mutantsAreRefusedOrRun() throws {
        let file = temporaryFile()
        defer { try? FileManager.default.removeItem(at: file) }
        let originals = try Self.caches().map { try SavedFile($0) }
        var random = Numbers(seed: 11), loaded = 0
        for i in 0 ..< Self.mutants {
            let mutant = originals[i % originals.count].mutated(&random)
            try mutant.write(to: file, &random)
            do {
                let caches = try H2OKVCache.loadedCaches(from: file).caches
                for cache in caches { try Self.run(cache) }
                try H2OKVCache.saveCaches(caches, to: file)
                _ = try H2OKVCache.loadedCaches(from: file)
                loaded += 1
            } catch is H2OError {
                continue
            }
        }
        // Neither would say anything if it were all.
        #expect(loaded > Self.mutants / 50 && loaded < Self.mutants, "\(loaded) loaded")
    }

    /// One cache of every form.
    private static func caches() throws -> [any KVCache] {
        let rows = RowStream(tokens: 60)
        var caches: [H2OKVCache] = try CacheTests.stores.map { _, packing in
            try H2OKVCache([14, 20], packing: packing)
        }
        caches.insert(
            try H2OKVCache(
                [20, 20], policy: H2OPolicies.H2O().with { $0.evictEvery = 3 },
                packing: CacheTests.stores[2].packing), at: 3)
        caches.append(
            try H2OKVCache([40, 40], policy: H2OPolicies.Distinct.keysOnly, attends: false))
        caches.append(
            try H2OKVCache([14, 14], policy: H2OPolicies.Streaming(), remainder: false))
        caches.append(
            try H2OKVCache(
                [14, 20], policy: H2OPolicies.Salient(),
                packing: CacheTests.stores[1].packing,
                frame: H2OFrame(of: rows.keys), saturation: [0, 2]))
        let filling = [(20, [14, 26]), (39, [24, 16]), (80, [16, 24])].map {
            Stage(beyond: $0, budgets: $1)
        }
        caches.append(
            try H2OKVCache(
                CacheSettings(
                    [20, 20], policy: H2OPolicies.Distinct(), remainder: true,
                    attends: true,
                    packing: .dense, undo: 0, filling: filling), PressureShare(nil, nil)))
        for cache in caches { rows.run(cache, [30] + ones(10)) }
        let plain = KVCacheSimple()
        _ = plain.update(keys: rows.keys[0..., 0..., ..<9], values: rows.values[0..., 0..., ..<9])
        return caches + [plain]
    }

    /// Some steps and a chunk with rows such as the cache holds.
    private static func run(_ cache: any KVCache) throws {
        guard let cache = cache as? H2OKVCache else {
            let (keys, _) = cache.update(
                keys: MLXArray.zeros([1, 2, 1, 32], dtype: .float32),
                values: MLXArray.zeros([1, 2, 1, 32], dtype: .float32))
            eval(keys)
            return
        }
        guard cache.offset < 100_000 else { return }
        let types = cache.rowTypes
        let rows = RowStream(
            batch: types?.batch ?? 1, heads: 2 * (types?.heads ?? 2), kvHeads: types?.heads ?? 2,
            tokens: 8, width: types?.keyWidth ?? 32, valueWidth: types?.valueWidth,
            dtype: types?.keyDType ?? .float32)
        for range in [0 ..< 1, 1 ..< 2, 2 ..< 7, 7 ..< 8] {
            let output = h2oAttention(
                queries: rows.queries[0..., 0..., range], keys: rows.keys[0..., 0..., range],
                values: rows.values[0..., 0..., range], cache: cache, scale: 0.18,
                mask: cache.makeMask(n: range.count, windowSize: nil, returnArray: false))
            eval(output)
        }
        _ = try cache.keptPositions()
    }
}

/// SplitMix64.
private struct Numbers: RandomNumberGenerator {
    private var state: UInt64

    init(seed: UInt64) { state = seed }

    mutating func next() -> UInt64 {
        state &+= 0x9E37_79B9_7F4A_7C15
        var z = state
        z = (z ^ (z >> 30)) &* 0xBF58_476D_1CE4_E5B9
        z = (z ^ (z >> 27)) &* 0x94D0_49BB_1331_11EB
        return z ^ (z >> 31)
    }
}

/// A saved cache in parts that can be changed; its digest is made anew.
private struct SavedFile {
    var configuration: H2OSettingValue
    private var arrays: [String: H2OSettingValue] = [:]
    private var bytes: [String: Data] = [:]
    private let kind: String
    private let scalars: H2OSettingValue

    init(_ cache: any KVCache) throws {
        let file = temporaryFile()
        defer { try? FileManager.default.removeItem(at: file) }
        try H2OKVCache.saveCaches([cache], to: file)
        let read = try SafetensorsFile(file)
        let entry = try H2OSettingValue(parsing: read.metadata["entries"]!).array![0]
        kind = entry["class"]!.string!
        configuration = entry["config"] ?? .null
        scalars = entry["scalars"] ?? .null
        let names: [DType: String] = [
            .float32: "F32", .float16: "F16", .int16: "I16", .int32: "I32", .uint32: "U32",
        ]
        for (name, array) in read.entries {
            arrays[name] = .object([
                "dtype": .string(names[array.dtype]!),
                "shape": .array(array.shape.map { .int($0) }),
            ])
            bytes[name] = array.bytes
        }
    }

    static func write(_ header: Data, _ data: Data, to file: URL) throws {
        let size = withUnsafeBytes(of: UInt64(header.count).littleEndian) { Data($0) }
        try (size + header + data).write(to: file)
    }

    /// With one to three things changed.
    func mutated(_ random: inout Numbers) -> SavedFile {
        var mutant = self
        for _ in 0 ..< Int.random(in: 1 ... 3, using: &random) {
            switch Int.random(in: 0 ..< 10, using: &random) {
            case 0 ..< 5: mutant.configuration = mutant.configuration.mutated(&random)
            case 5 ..< 7:
                let name = arrays.keys.sorted().randomElement(using: &random)!
                mutant.arrays[name] = mutant.arrays[name]?.mutated(&random)
            case 7: mutant.arrays[arrays.keys.sorted().randomElement(using: &random)!] = nil
            default:
                let integers = arrays.keys.sorted().filter {
                    arrays[$0]!["dtype"]!.string != "F32"
                }
                guard let name = integers.randomElement(using: &random) else { continue }
                let place = Int.random(in: 0 ..< bytes[name]!.count, using: &random)
                mutant.bytes[name]![place] = UInt8.random(in: 0 ... 255, using: &random)
            }
        }
        return mutant
    }

    /// Write it, now and then with a byte of the header changed or the end missing.
    func write(to file: URL, _ random: inout Numbers) throws {
        try write(to: file)
        guard Int.random(in: 0 ..< 8, using: &random) == 0 else { return }
        var whole = try Data(contentsOf: file)
        if Bool.random(using: &random) {
            whole = whole.prefix(Int.random(in: 0 ..< whole.count, using: &random))
        } else {
            let place = Int.random(in: 0 ..< min(whole.count, 600), using: &random)
            whole[place] = UInt8.random(in: 0 ... 255, using: &random)
        }
        try whole.write(to: file)
    }

    func write(to file: URL) throws {
        var entry: [String: H2OSettingValue] = ["class": .string(kind)]
        entry[kind == "KVCache" ? "scalars" : "config"] =
            kind == "KVCache" ? scalars : configuration
        var metadata = [
            "format": "mlx-h2o prompt cache", "version": "1", "metadata": "{}",
            "entries": H2OSettingValue.array([.object(entry)]).text,
        ]
        let dtypes: [String: DType] = [
            "F32": .float32, "F16": .float16, "I16": .int16, "I32": .int32, "U32": .uint32,
        ]
        metadata["digest"] = fileDigest(
            arrays.mapValues { array in
                (
                    dtype: array["dtype"]?.string.flatMap { dtypes[$0] } ?? .float32,
                    shape: array["shape"]?.array?.compactMap(\.int) ?? []
                )
            }, metadata
        ) { bytes[$0]! }
        var header = arrays, data = Data()
        for name in arrays.keys.sorted() {
            let end = data.count + bytes[name]!.count
            var description = arrays[name]!.object ?? [:]
            description["data_offsets"] =
                description["data_offsets"] ?? .array([.int(data.count), .int(end)])
            header[name] = .object(description)
            data.append(bytes[name]!)
        }
        header["__metadata__"] = .object(metadata.mapValues { .string($0) })
        try Self.write(Data(H2OSettingValue.object(header).text.utf8), data, to: file)
    }
}

extension H2OSettingValue {
    private static let nasty: [H2OSettingValue] = [
        .int(0), .int(1), .int(-1), .int(2), .int(3), .int(31), .int(64), .int(1 << 31),
        .int(1_000_000_000_000_000_000), .int(.max), .int(.min), .double(0.5), .double(-1e308),
        .double(0.999_999_999_999), .null, .bool(true), .bool(false), .string("x"), .string(""),
        .array([]), .object([:]), .array([.int(4), .int(4)]),
    ]

    /// With the value at a path (list members by their numbers) replaced.
    fileprivate func setting(_ path: [String], to value: H2OSettingValue) -> H2OSettingValue {
        guard let first = path.first else { return value }
        let rest = Array(path.dropFirst())
        switch self {
        case .object(var members):
            members[first] = (members[first] ?? .null).setting(rest, to: value)
            return .object(members)
        case .array(var members):
            members[Int(first)!] = members[Int(first)!].setting(rest, to: value)
            return .array(members)
        default: return value
        }
    }

    /// With one value somewhere in it replaced, removed or doubled.
    fileprivate func mutated(_ random: inout Numbers) -> H2OSettingValue {
        let goesOn = Int.random(in: 0 ..< 6, using: &random) > 0
        switch self {
        case .object(var members) where goesOn && !members.isEmpty:
            let key = members.keys.sorted().randomElement(using: &random)!
            let isRemoved = Int.random(in: 0 ..< 20, using: &random) == 0
            members[key] = isRemoved ? nil : members[key]!.mutated(&random)
            return .object(members)
        case .array(var members) where goesOn && !members.isEmpty:
            let place = members.indices.randomElement(using: &random)!
            switch Int.random(in: 0 ..< 12, using: &random) {
            case 0: members.remove(at: place)
            case 1: members.append(members[place])
            default: members[place] = members[place].mutated(&random)
            }
            return .array(members)
        case .int(let value) where Bool.random(using: &random):
            return .int(value &+ Int.random(in: -2 ... 2, using: &random))
        default: return Self.nasty.randomElement(using: &random)!
        }
    }
}
