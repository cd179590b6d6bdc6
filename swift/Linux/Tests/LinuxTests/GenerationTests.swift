import Foundation
import MLX
import MLXLLM
import MLXLMCommon
import MLXNN
import Testing

/// The caches and the loop that stock models run in.
@Suite struct GenerationTests {
    func rows(_ range: Range<Int>) -> MLXArray {
        MLXArray(range).asType(.float32).reshaped(1, 1, -1, 1)
    }

    @Test func simpleCacheKeepsEverything() {
        let cache = KVCacheSimple()
        cache.step = 4
        var seen: [Float] = []
        for range in [0 ..< 3, 3 ..< 4, 4 ..< 11, 11 ..< 12] {
            let (keys, values) = cache.update(keys: rows(range), values: -rows(range))
            seen += range.map { Float($0) }
            #expect(keys.asArray(Float.self) == seen)
            #expect(values.asArray(Float.self) == seen.map { -$0 })
        }
        let copy = cache.copy()
        #expect(cache.offset == 12 && copy.offset == 12)
        #expect(cache.trim(2) == 2)
        let (keys, _) = cache.update(keys: rows(20 ..< 21), values: rows(20 ..< 21))
        #expect(keys.asArray(Float.self) == seen[..<10] + [20])
        #expect(copy.state[0].asArray(Float.self) == seen)
    }

    @Test(arguments: [[1, 1, 1, 1, 1, 1, 1, 1, 1], [7, 1, 1, 4, 1, 1], [2, 3, 1, 9, 1]])
    func rotatingCacheKeepsTheLatest(_ chunks: [Int]) {
        let cache = RotatingKVCache(maxSize: 4, keep: 1)
        var offset = 0
        for count in chunks {
            let (keys, _) = cache.update(
                keys: rows(offset ..< offset + count), values: rows(offset ..< offset + count))
            offset += count
            // One new row: the first and the last three. A chunk sees three rows before it.
            let window = count == 1 ? 4 : 3 + count
            let expected =
                offset <= window
                ? Set(0 ..< offset) : Set([0]).union(offset - window + 1 ..< offset)
            #expect(Set(keys.asArray(Int.self)) == expected)
            #expect(cache.offset == offset)
        }
    }

    @Test func chunkedCacheForgetsAllButAChunk() {
        let cache = ChunkedKVCache(chunkSize: 4)
        for range in [0 ..< 3, 3 ..< 9, 9 ..< 10] {
            cache.maybeTrimFront()
            let (keys, values) = cache.update(keys: rows(range), values: -rows(range))
            let first = range.lowerBound == 9 ? 5 : 0
            #expect(keys.asArray(Int.self) == Array(first ..< range.upperBound))
            #expect(values.asArray(Int.self) == (first ..< range.upperBound).map { -$0 })
        }
        #expect(cache.offset == 10 && cache.metaState == ["4", "5"])
        #expect(ChunkedKVCache().metaState == ["None", "0"])
    }

    @Test func quantizedCacheKeepsEverything() {
        let cache = QuantizedKVCache(groupSize: 32, bits: 8)
        let rows = MLXRandom.normal([1, 2, 5, 32], key: MLXRandom.key(0))
        _ = cache.updateQuantized(keys: rows[0..., 0..., ..<3], values: rows[0..., 0..., ..<3])
        let (keys, _) = cache.updateQuantized(
            keys: rows[0..., 0..., 3...], values: rows[0..., 0..., 3...])
        let found = dequantized(keys.0, scales: keys.1, biases: keys.2, groupSize: 32, bits: 8)
        #expect(cache.offset == 5 && cache.innerState().count == 6)
        #expect(allClose(found, rows, atol: 0.02).item(Bool.self))
    }

    @Test func listsOfCaches() {
        let inner = CacheList(KVCacheSimple(), KVCacheSimple())
        let list = CacheList(MambaCache(), inner)
        (list[0] as! MambaCache)[1] = MLXArray(3)
        let copy = list.copy() as! CacheList
        var seen: [String] = []
        list.mapChildren { child in
            seen.append("\(type(of: child))")
            return child is MambaCache ? child : RotatingKVCache(maxSize: 4)
        }
        #expect(seen == ["MambaCache", "KVCacheSimple", "KVCacheSimple"])
        #expect((list[1] as! CacheList) === inner && inner[1] is RotatingKVCache)
        #expect((copy[1] as! CacheList)[1] is KVCacheSimple)
        #expect((copy[0] as! MambaCache)[1]?.item(Int.self) == 3)
        #expect(list.innerState().count == 1 && !list.isTrimmable)
    }

    @Test func masks() {
        let causal = createCausalMask(n: 2, offset: 3).asArray(Bool.self)
        #expect(causal == [true, true, true, true, false, true, true, true, true, true])
        let windowed = createCausalMask(n: 2, offset: 3, windowSize: 2).asArray(Bool.self)
        #expect(windowed == [false, false, true, true, false, false, false, false, true, true])
        guard case .causal = makeAttentionMask(n: 2, cache: nil) else {
            Issue.record("a chunk needs a causal mask")
            return
        }
    }

    /// Packed attention is attention over the unpacked rows.
    @Test(arguments: ["none", "causal", "bool", "additive", "heads"]) func packedAttention(
        _ kind: String
    ) {
        let q = MLXRandom.normal([2, 4, 3, 32], key: MLXRandom.key(0))
        let k = MLXRandom.normal([2, 2, 6, 32], key: MLXRandom.key(1))
        let v = MLXRandom.normal([2, 2, 6, 32], key: MLXRandom.key(2))
        let added = MLXRandom.normal(
            kind == "heads" ? [2, 4, 3, 6] : [2, 1, 3, 6], key: MLXRandom.key(3))
        let mask: MLXFast.ScaledDotProductAttentionMaskMode =
            switch kind {
            case "causal": .causal
            case "bool": .array(added .> -1)
            case "additive", "heads": .array(added)
            default: .none
            }
        func packed(_ x: MLXArray) -> (MLXArray, MLXArray, MLXArray?) {
            quantized(x, groupSize: 32, bits: 8)
        }
        func unpacked(_ x: (MLXArray, MLXArray, MLXArray?)) -> MLXArray {
            dequantized(x.0, scales: x.1, biases: x.2, groupSize: 32, bits: 8)
        }
        let output = quantizedScaledDotProductAttention(
            queries: q, quantizedKeys: packed(k), quantizedValues: packed(v), scale: 0.2,
            mask: mask, groupSize: 32, bits: 8)
        let expected = MLXFast.scaledDotProductAttention(
            queries: q, keys: unpacked(packed(k)), values: unpacked(packed(v)), scale: 0.2,
            mask: mask)
        #expect(allClose(output, expected, atol: 1e-4).item(Bool.self))
    }

    static let configuration = Data(
        """
        {"model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 2,
         "intermediate_size": 24, "num_attention_heads": 4, "rms_norm_eps": 1e-6,
         "vocab_size": 50, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": true}
        """.utf8)

    /// Greedy tokens, by evaluating everything again for each.
    func withoutCache(_ model: LanguageModel, _ prompt: [Int], _ count: Int) -> [Int] {
        var tokens = prompt
        for _ in 0 ..< count {
            let logits = model(MLXArray(tokens)[.newAxis], cache: nil)
            tokens.append(argMax(logits[0, -1]).item(Int.self))
        }
        return Array(tokens.dropFirst(prompt.count))
    }

    @Test(arguments: [2, 5, 512]) func iteratorIsGreedyDecoding(chunk: Int) async throws {
        let model = try await LLMTypeRegistry.shared.createModel(
            configuration: Self.configuration, modelType: "qwen3")
        let prompt = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7]
        let iterator = try TokenIterator(
            input: LMInput(tokens: MLXArray(prompt)), model: model,
            parameters: GenerateParameters(
                maxTokens: 12, temperature: 0, prefillStepSize: chunk))
        #expect(Array(iterator) == withoutCache(model, prompt, 12))
    }

    /// Llama 3.1's rule in the words of its paper: wavelengths above the trained length over `low`
    /// are stretched by the factor, those below it over `high` are not.
    @Test func ropeTypes() throws {
        let json = """
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4,
             "original_max_position_embeddings": 64, "seen": [1, 2.5], "on": true}
            """
        let scaling = try JSONDecoder().decode(
            [String: StringOrNumber].self, from: Data(json.utf8))
        #expect(scaling["rope_type"] == .string("llama3"))
        #expect(scaling["factor"]?.asFloat() == 8 && scaling["high_freq_factor"]?.asInt() == 4)
        #expect(scaling["seen"]?.asFloats() == [1, 2.5] && scaling["on"] == .bool(true))
        func rope(_ scaling: [String: StringOrNumber]?) -> any RoPELayer {
            initializeRope(
                dims: 16, base: 100, traditional: false, scalingConfig: scaling,
                maxPositionEmbeddings: nil)
        }
        func angles(_ rope: any RoPELayer, _ offset: Int) -> [Float] {
            let ones = concatenated([MLXArray.ones([8]), MLXArray.zeros([8])])
            let turned = rope(ones[.newAxis, .newAxis, .newAxis], offset: offset)[0, 0, 0]
            return (0 ..< 8).map {
                atan2(turned[$0 + 8].item(Float.self), turned[$0].item(Float.self))
            }
        }
        let (plain, stretched) = (angles(rope(nil), 1), angles(rope(scaling), 1))
        for i in 0 ..< 8 {
            let wavelength = 2 * .pi * pow(100, Float(i) / 8)
            #expect(abs(plain[i] - pow(100, -Float(i) / 8)) < 1e-6)
            switch wavelength {
            case 64...: #expect(abs(stretched[i] - plain[i] / 8) < 1e-6)
            case ..<16: #expect(abs(stretched[i] - plain[i]) < 1e-6)
            default: #expect(stretched[i] < plain[i] && stretched[i] > plain[i] / 8)
            }
        }
        let half = angles(rope(["type": .string("linear"), "factor": .float(2)]), 2)
        #expect(zip(half, plain).allSatisfy { abs($0 - $1) < 1e-6 })
    }

    @Test func registryReplaces() async throws {
        let registry = ModelTypeRegistry<Int>(creators: ["one": { _ in 1 }])
        await registry.registerModelType("one") { $0.count }
        #expect(try await registry.createModel(configuration: Data([1, 2]), modelType: "one") == 2)
        await #expect(throws: ModelFactoryError.self) {
            try await registry.createModel(configuration: Data(), modelType: "two")
        }
    }
}
