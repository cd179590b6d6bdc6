import Foundation
import MLX
import MLXLMCommon
import Testing

@testable import MLXH2O

/// Packed keys in a frame.
@Suite(.serialized) struct FrameTests {
    static let packings: [(name: String, packing: H2OPacking)] = [
        ("packed", try! H2OPacking(keyBits: 6, valueBits: 8, groupSize: 32)),
        ("keys", try! H2OPacking(keyBits: 8, groupSize: 32)),
        ("mixed", try! H2OPacking(keyBits: 4, valueBits: 4, groupSize: 32, recentBits: 16)),
    ]

    /// Keys with a few channels far away, as models have them.
    private func rows(tokens: Int) -> RowStream {
        var rows = RowStream(tokens: tokens)
        let offsets = (0 ..< 32).map { $0 == 3 ? Float(40) : $0 == 17 ? -25 : 0 }
        rows.keys = rows.keys + MLXArray(offsets)
        return rows
    }

    private func cache(
        _ packing: H2OPacking, _ frame: H2OFrame?, undo: Int = 0,
        policy: any H2OPolicy = H2OPolicies.Salient()
    ) throws -> H2OKVCache {
        try H2OKVCache(
            [20, 28], policy: policy, packing: packing, undo: undo, frame: frame)
    }

    @Test func centreIsTheMeanAndScaleTheGreatestDistance() throws {
        let keys = MLXArray([1, 10, 3, 10, 5, 10] as [Float], [1, 1, 3, 2])
        let frame = try H2OFrame(of: keys)
        #expect(frame.centre == [[3, 10]] && frame.scale == [[2, H2OFrame.leastScale]])
        let framed = try H2OFrame(of: rows(tokens: 40).keys)
        #expect(framed.heads == 2 && framed.width == 32)
        let arrays = FrameArrays(framed),
            column = { (x: MLXArray) in x.expandedDimensions(axis: 1) }
        let whole = (rows(tokens: 40).keys - column(arrays.centre)) / column(arrays.scale)
        #expect(abs(abs(whole).max().item(Float.self) - 1) < 1e-5)
        #expect(abs(whole.mean(axes: [0, 2])).max().item(Float.self) < 1e-5)
    }

    /// Within budget outputs are those of exact rows, as near as packing lets them, and nearer than
    /// without the frame.
    @Test func outputsNeedNothingBack() throws {
        let rows = rows(tokens: 18), frame = try H2OFrame(of: rows.keys)
        let chunks = [9] + ones(9)
        let exact = rows.run(try cache(.dense, nil), chunks)
        for (name, packing) in Self.packings.prefix(2) {
            func error(_ frame: H2OFrame?) throws -> Float {
                let actual = try rows.run(cache(packing, frame), chunks)
                return square(actual - exact).mean().item(Float.self)
            }
            let (framed, plain) = (try error(frame), try error(nil))
            #expect(framed < plain / 4, "\(name) \(framed) \(plain)")
        }
    }

    /// Past the budget too a frame is a change of coordinates: one that only shifts by what every
    /// key has changes no choice and, but for rounding, no output.
    @Test func aFrameChangesNoChoice() throws {
        let rows = RowStream(tokens: 70), packing = Self.packings[1].packing
        let still = Array(repeating: [Float](repeating: 0, count: 32), count: 2)
        let unit = still.map { $0.map { _ in Float(1) } }
        let frame = try H2OFrame(centre: still, scale: unit)
        let (plain, framed) = (try cache(packing, nil), try cache(packing, frame))
        let expected = rows.run(plain, [30, 10] + ones(30))
        #expect(same(rows.run(framed, [30, 10] + ones(30)), expected))
        #expect(try framed.keptPositions() == plain.keptPositions())
        #expect(framed.nbytes == plain.nbytes + 2 * 4 * 2 * 32)
    }

    @Test func copiesStatesAndFilesKeepIt() throws {
        let file = temporaryFile()
        defer { try? FileManager.default.removeItem(at: file) }
        for (name, packing) in Self.packings {
            let rows = rows(tokens: 80), frame = try H2OFrame(of: rows.keys)
            let cache = try cache(packing, frame)
            rows.run(cache, [30] + ones(10))
            let copy = cache.copy() as! H2OKVCache
            // Its own frame is another's, and gives way.
            let twin = try self.cache(packing, H2OFrame(of: rows.queries[0..., 0 ..< 2]))
            twin.state = cache.state
            twin.metaState = cache.metaState
            try H2OKVCache.saveCaches([cache], to: file)
            let loaded = try H2OKVCache.loadedCaches(from: file).caches[0] as! H2OKVCache
            let expected = rows.run(cache, ones(15) + [9] + ones(5))
            for other in [copy, twin, loaded] {
                #expect(other.frame == frame)
                #expect(same(rows.run(other, ones(15) + [9] + ones(5)), expected), "\(name)")
                #expect(try other.keptPositions() == cache.keptPositions(), "\(name)")
                #expect(other.nbytes == cache.nbytes)
            }
        }
    }

    /// An empty cache's frame is saved too.
    @Test func emptyCachesKeepIt() throws {
        let frame = try H2OFrame(of: rows(tokens: 20).keys), packing = Self.packings[0].packing
        let cache = try cache(packing, frame), twin = try self.cache(packing, nil)
        twin.state = cache.state
        twin.metaState = cache.metaState
        #expect(twin.frame == frame)
        twin.state = try self.cache(packing, nil).state
        twin.metaState = try self.cache(packing, nil).metaState
        #expect(twin.frame == nil)
    }

    @Test func stepsAreTakenBackInIt() throws {
        for (name, packing) in Self.packings {
            let rows = rows(tokens: 60), frame = try H2OFrame(of: rows.keys)
            let plain = try cache(packing, frame, undo: 4)
            let undone = try cache(packing, frame, undo: 4)
            rows.run(plain, [30] + ones(5))
            rows.run(undone, [30] + ones(9))
            #expect(undone.trim(4) == 4)
            #expect(same(rows.run(undone, ones(7)), rows.run(plain, ones(7))), "\(name)")
            // A chunk that is taken back in part is attended to once more, and enters once.
            rows.run(plain, [9])
            rows.run(undone, [12])
            #expect(undone.trim(3) == 3)
            #expect(same(rows.run(undone, ones(3)), rows.run(plain, ones(3))), "\(name)")
        }
    }

    @Test func descriptionsTellOfIt() throws {
        let frame = try H2OFrame(of: rows(tokens: 20).keys)
        func reason(_ packing: H2OPacking, _ frame: H2OFrame?, _ saturation: [Float]) throws
            -> String
        {
            let cache = try H2OKVCache(
                [20, 28], packing: packing, frame: frame, saturation: saturation)
            return H2OKVCache.describe([cache])[0].reason
        }
        let end = "policy salient, evicted tokens go on answering"
        #expect(try reason(.dense, nil, [4]) == "20 to 28 slots a KV head, " + end)
        #expect(
            try reason(Self.packings[0].packing, frame, [0, 2.5])
                == "20 to 28 slots a KV head with keys in 6 bits and values in 8 bits in a frame, "
                + end + " with saturation 0 to 2.5")
        #expect(
            try reason(Self.packings[2].packing, nil, [0])
                == "20 to 28 slots a KV head in 4 bits, the newest unpacked, " + end
                + " with saturation 0")
    }

    @Test func sinksNeedACentreOfZero() throws {
        let rows = RowStream(tokens: 40), sinks = MLXArray([0.5, -1, 2, 0] as [Float])
        let zero = Array(repeating: [Float](repeating: 0, count: 32), count: 2)
        let halves = try H2OFrame(centre: zero, scale: zero.map { $0.map { _ in 2 } })
        let packing = Self.packings[1].packing
        let expected = try rows.run(cache(packing, nil), [30] + ones(5), sinks: sinks)
        let actual = try rows.run(cache(packing, halves), [30] + ones(5), sinks: sinks)
        #expect(abs(actual - expected).max().item(Float.self) < 1e-5)
    }

    #if os(macOS) || os(Linux)  // where exit tests exist
        @Test func sinksWithAnotherCentreStop() async {
            await #expect(processExitsWith: .failure) {
                let rows = RowStream(tokens: 12), frame = try H2OFrame(of: rows.keys)
                let cache = try H2OKVCache(
                    [20, 28], packing: H2OPacking(keyBits: 8, groupSize: 32), frame: frame)
                rows.run(cache, [12], sinks: MLXArray.zeros([4]))
            }
        }
    #endif

    @Test func whatCannotBeIsRefused() throws {
        let frame = try H2OFrame(of: RowStream(tokens: 9).keys)
        let packing = Self.packings[0].packing
        for wrong in [
            { try H2OFrame(centre: [], scale: []) }, { try H2OFrame(centre: [[0]], scale: [[0]]) },
            { try H2OFrame(centre: [[0]], scale: [[1, 1]]) },
            { try H2OFrame(centre: [[.nan]], scale: [[1]]) },
            { try H2OFrame(of: MLXArray.zeros([1, 2, 0, 32])) },
        ] as [() throws -> H2OFrame] {
            #expect(throws: H2OError.self) { try wrong() }
        }
        #expect(throws: H2OError.self) { try H2OKVCache([64, 64], frame: frame) }
        #expect(throws: H2OError.self) {
            try H2OKVCache(
                [64, 64], packing: H2OPacking(valueBits: 8, groupSize: 32), frame: frame)
        }
        #expect(throws: H2OError.self) {
            try H2OKVCache(
                [64, 64], policy: H2OPolicies.Streaming(), attends: false, frame: frame)
        }
        #expect(throws: H2OError.self) {
            try H2OKVCache([64, 64, 64], packing: packing, frame: frame)
        }
        let wide = try H2OKVCache([64, 64], packing: packing, frame: frame)
        #expect(throws: (any Error).self) {
            try withError { RowStream(tokens: 9, width: 64).run(wide, [9]) }
        }
    }

    /// Files whose frame is none, or another layer's, are refused.
    @Test func damagedFramesAreRefused() throws {
        let rows = rows(tokens: 30), frame = try H2OFrame(of: rows.keys)
        let cache = try cache(Self.packings[0].packing, frame)
        rows.run(cache, [24])
        let whole = Dictionary(uniqueKeysWithValues: cache.namedArrays.map { ($0.name, $0.array) })
        let wrong: [MLXArray?] = [
            nil, MLXArray.zeros([2, 32], dtype: .float32),
            MLXArray.ones([3, 32], dtype: .float32), MLXArray.ones([2, 16], dtype: .float32),
            MLXArray.ones([2, 32], dtype: .float16), MLXArray.ones([64], dtype: .float32),
            MLXArray.full([2, 32], values: MLXArray(Float.nan)),
        ]
        _ = try H2OKVCache.restored(whole, cache.configuration)
        for scale in wrong {
            var damaged = whole
            damaged["frame.scale"] = scale
            #expect(throws: H2OError.self) {
                try H2OKVCache.restored(damaged, cache.configuration)
            }
        }
    }
}
