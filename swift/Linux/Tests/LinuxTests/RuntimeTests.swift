import Foundation
import MLX
import Testing

/// Errors, files, threads, memory.
@Suite struct RuntimeTests {
    @Test func errorsAreThrown() throws {
        let a = MLXArray.ones([2, 3])
        #expect(throws: MLXError.self) { try withError { matmul(a, a).eval() } }
        // What a failed operation gives can be used until the body ends.
        #expect(throws: MLXError.self) {
            try withError { matmul(a, a).reshaped(-1).asArray(Int.self) }
        }
        let fine = try withError { (a + 1).sum().item(Float.self) }
        #expect(fine == 12)
    }

    @Test func files() throws {
        let folder = FileManager.default.temporaryDirectory.appending(path: UUID().uuidString)
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        defer { try? FileManager.default.removeItem(at: folder) }
        let url = folder.appending(path: "a b.safetensors")
        let x = MLXArray(0 ..< 6, [2, 3])
        let arrays = ["x": x, "half": x.asType(.float16), "column": x[0..., 1]]
        try save(arrays: arrays, metadata: ["one": "1", "ü": "ö"], url: url)
        let (loaded, metadata) = try loadArraysAndMetadata(url: url)
        #expect(metadata["one"] == "1" && metadata["ü"] == "ö")
        #expect(Set(loaded.keys) == Set(arrays.keys))
        for (name, array) in arrays {
            #expect(loaded[name]!.dtype == array.dtype)
            #expect(arrayEqual(loaded[name]!, array).item(Bool.self))
        }
        #expect(throws: LoadSaveError.self) { try save(arrays: arrays, url: folder) }
        #expect(throws: MLXError.self) {
            try loadArrays(url: folder.appending(path: "none.safetensors"))
        }
    }

    @Test func manyThreads() async {
        let shared = MLXArray(0 ..< 100).asType(.float32)
        let lazy = (shared * 2).sum()
        let sums = await withTaskGroup(of: Float.self) { group in
            for i in 0 ..< 16 {
                // An array is not Sendable; the tests of a Mac hand it over all the same.
                nonisolated(unsafe) let (shared, lazy) = (shared, lazy)
                group.addTask {
                    var total = shared
                    for _ in 0 ..< 50 { total = total + Float(i) }
                    asyncEval(total)
                    return (total.sum() + lazy).item(Float.self)
                }
            }
            return await group.reduce(into: []) { $0.append($1) }
        }
        let expected = (0 ..< 16).map { (i: Int) -> Float in Float(3 * 4950 + 5000 * i) }
        #expect(sums.sorted() == expected)
    }

    @Test func randomKeys() {
        let (a, b) = MLXRandom.split(key: MLXRandom.key(1))
        #expect(a.asArray(UInt32.self) != b.asArray(UInt32.self))
        let first = MLXRandom.normal([4], key: MLXRandom.key(9)).asArray(Float.self)
        #expect(first == MLXRandom.normal([4], key: MLXRandom.key(9)).asArray(Float.self))
        let states = [1, 1, 2].map { MLXRandom.RandomState(seed: $0) }
        let drawn = states.map { state in
            withRandomState(state) { MLXRandom.normal([4]) }.asArray(Float.self)
        }
        #expect(drawn[0] == drawn[1] && drawn[0] != drawn[2])
        let dice = MLXRandom.randInt(1 ..< 7, [1000], key: MLXRandom.key(3)).asArray(Int.self)
        #expect(Set(dice) == Set(1 ... 6))
    }

    @Test func devices() {
        #expect(Device.defaultDevice() == .cpu && Device.defaultDevice().deviceType == .cpu)
        #expect(!GPU.deviceInfo().architecture.isEmpty)
    }

    @Test func memory() {
        let x = MLXArray.ones([1 << 20])
        let y = x + 1
        y.eval()
        #expect(Memory.activeMemory >= 4 << 20)
        #expect(Memory.snapshot().peakMemory >= Memory.snapshot().activeMemory)
        let limit = Memory.cacheLimit
        Memory.cacheLimit = 1 << 20
        #expect(Memory.cacheLimit == 1 << 20)
        Memory.cacheLimit = limit
        #expect(y.size == 1 << 20)
    }

    @Test func evaluatesWhatItFinds() {
        let (a, b) = (MLXArray(1) + 1, MLXArray(2) + 1)
        eval(a, [b], ["name": a], (a, b), "text", 3)
        asyncEval([a, b])
        #expect(a.item(Int.self) == 2 && b.item(Int.self) == 3)
    }
}
