import Foundation
import MLX
import MLXLLM
import MLXLMCommon
import MLXNN

/// Llama, Mistral, Qwen2 and Qwen3: one family, told apart by its configuration.
final class H2OTransformer: Module, LLMModel, H2OModel {
    let configuration: TransformerConfiguration
    let h2o: H2OConfiguration
    let model: TransformerLayers
    @ModuleInfo(key: "lm_head") var head: Linear?
    private let trial = TrialOnce()
    private var stock = StockModel(model: nil)
    // Of the types that these conventions have in the mlx-swift-lm at hand.
    private(set) var toolCallFormat = (nil as LlamaModel?)?.toolCallFormat
    private(set) var reasoningConfig = (nil as Qwen3Model?)?.reasoningConfig

    /// The stock model beside this one, whose weights are never computed. No module, so that they are
    /// not taken for this model's.
    private struct StockModel {
        let model: (any LLMModel)?
    }

    init(configurationData: Data, h2o: H2OConfiguration) throws {
        let decoder = JSONDecoder()
        decoder.allowsJSON5 = true
        configuration = try decoder.decode(TransformerConfiguration.self, from: configurationData)
        self.h2o = h2o
        model = TransformerLayers(configuration)
        super.init()
        if !configuration.tiesEmbeddings {
            _head.wrappedValue = Linear(
                configuration.hiddenSize, configuration.vocabularySize, bias: false)
        }
        // After the layers: a seed gives them the weights that it gives the stock model's.
        let stock = try stockModel(configurationData)
        self.stock = StockModel(model: stock)
        toolCallFormat = (stock as? LlamaModel)?.toolCallFormat
        reasoningConfig = (stock as? Qwen3Model)?.reasoningConfig
    }

    var modelType: String { configuration.modelType }
    var vocabularySize: Int { configuration.vocabularySize }
    var loraLayers: [Module] { model.layers }

    func embedded(_ tokens: MLXArray) -> MLXArray { model.embedding(tokens) }

    func callAsFunction(_ inputs: MLXArray, cache: [any KVCache]?) -> MLXArray {
        let hidden = model(inputs, caches: cache)
        return head.map { $0(hidden) } ?? model.embedding.asLinear(hidden)
    }

    func sanitize(weights: [String: MLXArray]) -> [String: MLXArray] {
        weights.filter { name, _ in
            !name.contains("rotary_emb.inv_freq")
                && !(configuration.tiesEmbeddings && name == "lm_head.weight")
        }
    }

    /// None where the configuration scales positions, or has heads of a width that no RoPE turns.
    var plainRope: H2ORope? {
        guard configuration.ropeScaling == nil else { return nil }
        return try? H2ORope(
            dimensions: configuration.headWidth, base: configuration.ropeBase,
            traditional: configuration.ropeTraditional)
    }

    func plainCaches() -> [any KVCache] { model.layers.map { _ in KVCacheSimple() } }

    func newCache(parameters: GenerateParameters?) -> [any KVCache] {
        h2o.requestedCaches(
            for: self, plain: plainCaches,
            { try trial.result { try h2o.trial(of: self, with: plainCaches()) } }, parameters)
    }

    func messageGenerator(tokenizer: any Tokenizer) -> any MessageGenerator {
        stock.model?.messageGenerator(tokenizer: tokenizer) ?? DefaultMessageGenerator()
    }
}

final class TransformerLayers: Module {
    @ModuleInfo(key: "embed_tokens") var embedding: Embedding
    let layers: [TransformerLayer]
    let norm: RMSNorm

    init(_ c: TransformerConfiguration) {
        layers = (0 ..< c.layers).map { _ in TransformerLayer(c) }
        norm = RMSNorm(dimensions: c.hiddenSize, eps: c.normEpsilon)
        super.init()
        _embedding.wrappedValue = Embedding(
            embeddingCount: c.vocabularySize, dimensions: c.hiddenSize)
    }

    func callAsFunction(_ tokens: MLXArray, caches: [any KVCache]?) -> MLXArray {
        var hidden = embedding(tokens)
        let mask = createAttentionMask(h: hidden, cache: caches?.first)
        for (i, layer) in layers.enumerated() {
            hidden = layer(hidden, mask: mask, cache: caches?[i])
        }
        return norm(hidden)
    }
}

final class TransformerLayer: Module {
    @ModuleInfo(key: "self_attn") var attention: TransformerAttention
    let mlp: TransformerMLP
    @ModuleInfo(key: "input_layernorm") var inputNorm: RMSNorm
    @ModuleInfo(key: "post_attention_layernorm") var outputNorm: RMSNorm

    init(_ c: TransformerConfiguration) {
        mlp = TransformerMLP(c)
        super.init()
        _attention.wrappedValue = TransformerAttention(c)
        _inputNorm.wrappedValue = RMSNorm(dimensions: c.hiddenSize, eps: c.normEpsilon)
        _outputNorm.wrappedValue = RMSNorm(dimensions: c.hiddenSize, eps: c.normEpsilon)
    }

    func callAsFunction(
        _ x: MLXArray, mask: MLXFast.ScaledDotProductAttentionMaskMode, cache: (any KVCache)?
    ) -> MLXArray {
        let x = x + attention(inputNorm(x), mask: mask, cache: cache)
        return x + mlp(outputNorm(x))
    }
}

final class TransformerAttention: Module {
    let configuration: TransformerConfiguration
    let rope: any RoPELayer
    @ModuleInfo(key: "q_proj") var queryProjection: Linear
    @ModuleInfo(key: "k_proj") var keyProjection: Linear
    @ModuleInfo(key: "v_proj") var valueProjection: Linear
    @ModuleInfo(key: "o_proj") var outputProjection: Linear
    @ModuleInfo(key: "q_norm") var queryNorm: RMSNorm?
    @ModuleInfo(key: "k_norm") var keyNorm: RMSNorm?

    init(_ c: TransformerConfiguration) {
        configuration = c
        rope = initializeRope(
            dims: c.headWidth, base: c.ropeBase, traditional: c.ropeTraditional,
            scalingConfig: c.ropeScaling, maxPositionEmbeddings: c.maxPositions)
        super.init()
        let (width, bias) = (c.hiddenSize, c.projectionBias)
        _queryProjection.wrappedValue = Linear(width, c.heads * c.headWidth, bias: bias)
        _keyProjection.wrappedValue = Linear(width, c.kvHeads * c.headWidth, bias: bias)
        _valueProjection.wrappedValue = Linear(width, c.kvHeads * c.headWidth, bias: bias)
        _outputProjection.wrappedValue = Linear(
            c.heads * c.headWidth, width, bias: c.outputBias)
        if c.normalisesHeads {
            _queryNorm.wrappedValue = RMSNorm(dimensions: c.headWidth, eps: c.normEpsilon)
            _keyNorm.wrappedValue = RMSNorm(dimensions: c.headWidth, eps: c.normEpsilon)
        }
    }

    func callAsFunction(
        _ x: MLXArray, mask: MLXFast.ScaledDotProductAttentionMaskMode, cache: (any KVCache)?
    ) -> MLXArray {
        let (B, L) = (x.dim(0), x.dim(1))
        func heads(_ rows: MLXArray, _ norm: RMSNorm?) -> MLXArray {
            let split = rows.reshaped([B, L, -1, configuration.headWidth])
            return (norm.map { $0(split) } ?? split).transposed(0, 2, 1, 3)
        }
        let offset = cache?.ropeOffset
        let output = h2oAttention(
            queries: applyRotaryPosition(
                rope, to: heads(queryProjection(x), queryNorm), offset: offset),
            keys: applyRotaryPosition(rope, to: heads(keyProjection(x), keyNorm), offset: offset),
            values: heads(valueProjection(x), nil), cache: cache,
            scale: 1 / Float(configuration.headWidth).squareRoot(), mask: mask)
        return outputProjection(output.transposed(0, 2, 1, 3).reshaped([B, L, -1]))
    }
}

final class TransformerMLP: Module {
    @ModuleInfo(key: "gate_proj") var gate: Linear
    @ModuleInfo(key: "up_proj") var up: Linear
    @ModuleInfo(key: "down_proj") var down: Linear

    init(_ c: TransformerConfiguration) {
        super.init()
        _gate.wrappedValue = Linear(c.hiddenSize, c.intermediateSize, bias: c.mlpBias)
        _up.wrappedValue = Linear(c.hiddenSize, c.intermediateSize, bias: c.mlpBias)
        _down.wrappedValue = Linear(c.intermediateSize, c.hiddenSize, bias: c.mlpBias)
    }

    func callAsFunction(_ x: MLXArray) -> MLXArray { down(silu(gate(x)) * up(x)) }
}
