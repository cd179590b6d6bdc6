import Foundation
import MLX
import MLXLMCommon
import MLXNN

public struct Qwen3Configuration: Codable, Sendable {
    var hiddenSize: Int
    var hiddenLayers: Int
    var intermediateSize: Int
    var attentionHeads: Int
    var rmsNormEps: Float
    var vocabularySize: Int
    var kvHeads: Int
    var ropeTheta: Float?
    var headDim: Int
    var tieWordEmbeddings: Bool?

    enum CodingKeys: String, CodingKey {
        case hiddenSize = "hidden_size"
        case hiddenLayers = "num_hidden_layers"
        case intermediateSize = "intermediate_size"
        case attentionHeads = "num_attention_heads"
        case rmsNormEps = "rms_norm_eps"
        case vocabularySize = "vocab_size"
        case kvHeads = "num_key_value_heads"
        case ropeTheta = "rope_theta"
        case headDim = "head_dim"
        case tieWordEmbeddings = "tie_word_embeddings"
    }
}

private class Attention: Module {
    let configuration: Qwen3Configuration
    let rope: RoPE

    @ModuleInfo(key: "q_proj") var wq: Linear
    @ModuleInfo(key: "k_proj") var wk: Linear
    @ModuleInfo(key: "v_proj") var wv: Linear
    @ModuleInfo(key: "o_proj") var wo: Linear
    @ModuleInfo(key: "q_norm") var qNorm: RMSNorm
    @ModuleInfo(key: "k_norm") var kNorm: RMSNorm

    init(_ c: Qwen3Configuration) {
        configuration = c
        rope = RoPE(dimensions: c.headDim, base: c.ropeTheta ?? 1_000_000)
        super.init()
        _wq.wrappedValue = Linear(c.hiddenSize, c.attentionHeads * c.headDim, bias: false)
        _wk.wrappedValue = Linear(c.hiddenSize, c.kvHeads * c.headDim, bias: false)
        _wv.wrappedValue = Linear(c.hiddenSize, c.kvHeads * c.headDim, bias: false)
        _wo.wrappedValue = Linear(c.attentionHeads * c.headDim, c.hiddenSize, bias: false)
        _qNorm.wrappedValue = RMSNorm(dimensions: c.headDim, eps: c.rmsNormEps)
        _kNorm.wrappedValue = RMSNorm(dimensions: c.headDim, eps: c.rmsNormEps)
    }

    func callAsFunction(
        _ x: MLXArray, mask: MLXFast.ScaledDotProductAttentionMaskMode, cache: KVCache?
    ) -> MLXArray {
        func heads(_ rows: MLXArray) -> MLXArray {
            rows.reshaped(x.dim(0), x.dim(1), -1, configuration.headDim)
        }
        let queries = qNorm(heads(wq(x))).transposed(0, 2, 1, 3)
        let keys = kNorm(heads(wk(x))).transposed(0, 2, 1, 3)
        let values = heads(wv(x)).transposed(0, 2, 1, 3)
        let offset = cache?.ropeOffset
        let output = attentionWithCacheUpdate(
            queries: applyRotaryPosition(rope, to: queries, offset: offset),
            keys: applyRotaryPosition(rope, to: keys, offset: offset), values: values,
            cache: cache, scale: pow(Float(configuration.headDim), -0.5), mask: mask)
        return wo(output.transposed(0, 2, 1, 3).reshaped(x.dim(0), x.dim(1), -1))
    }
}

private class MLP: Module, UnaryLayer {
    @ModuleInfo(key: "gate_proj") var gate: Linear
    @ModuleInfo(key: "down_proj") var down: Linear
    @ModuleInfo(key: "up_proj") var up: Linear

    init(_ c: Qwen3Configuration) {
        super.init()
        _gate.wrappedValue = Linear(c.hiddenSize, c.intermediateSize, bias: false)
        _down.wrappedValue = Linear(c.intermediateSize, c.hiddenSize, bias: false)
        _up.wrappedValue = Linear(c.hiddenSize, c.intermediateSize, bias: false)
    }

    func callAsFunction(_ x: MLXArray) -> MLXArray { down(silu(gate(x)) * up(x)) }
}

private class Block: Module {
    @ModuleInfo(key: "self_attn") var attention: Attention
    @ModuleInfo(key: "input_layernorm") var attentionNorm: RMSNorm
    @ModuleInfo(key: "post_attention_layernorm") var mlpNorm: RMSNorm
    let mlp: MLP

    init(_ c: Qwen3Configuration) {
        mlp = MLP(c)
        super.init()
        _attention.wrappedValue = Attention(c)
        _attentionNorm.wrappedValue = RMSNorm(dimensions: c.hiddenSize, eps: c.rmsNormEps)
        _mlpNorm.wrappedValue = RMSNorm(dimensions: c.hiddenSize, eps: c.rmsNormEps)
    }

    func callAsFunction(
        _ x: MLXArray, mask: MLXFast.ScaledDotProductAttentionMaskMode, cache: KVCache?
    ) -> MLXArray {
        let h = x + attention(attentionNorm(x), mask: mask, cache: cache)
        return h + mlp(mlpNorm(h))
    }
}

public class Qwen3ModelInner: Module {
    @ModuleInfo(key: "embed_tokens") var embedTokens: Embedding
    fileprivate let layers: [Block]
    let norm: RMSNorm

    public init(_ c: Qwen3Configuration) {
        layers = (0 ..< c.hiddenLayers).map { _ in Block(c) }
        norm = RMSNorm(dimensions: c.hiddenSize, eps: c.rmsNormEps)
        super.init()
        _embedTokens.wrappedValue = Embedding(
            embeddingCount: c.vocabularySize, dimensions: c.hiddenSize)
    }

    public func callAsFunction(_ inputs: MLXArray, cache: [KVCache]? = nil) -> MLXArray {
        var h = embedTokens(inputs)
        let mask = createAttentionMask(h: h, cache: cache?.first)
        for (i, layer) in layers.enumerated() { h = layer(h, mask: mask, cache: cache?[i]) }
        return norm(h)
    }
}

/// Stands for the stock models: it attends through `attentionWithCacheUpdate`.
public class Qwen3Model: Module, LLMModel, KVCacheDimensionProvider {
    public let vocabularySize: Int
    public let kvHeads: [Int]
    public let model: Qwen3ModelInner
    @ModuleInfo(key: "lm_head") var lmHead: Linear?

    public init(_ c: Qwen3Configuration) {
        vocabularySize = c.vocabularySize
        kvHeads = Array(repeating: c.kvHeads, count: c.hiddenLayers)
        model = Qwen3ModelInner(c)
        super.init()
        if c.tieWordEmbeddings != true {
            _lmHead.wrappedValue = Linear(c.hiddenSize, c.vocabularySize, bias: false)
        }
    }

    public func callAsFunction(_ inputs: MLXArray, cache: [KVCache]?) -> MLXArray {
        let h = model(inputs, cache: cache)
        return lmHead?(h) ?? model.embedTokens.asLinear(h)
    }

    public func sanitize(weights: [String: MLXArray]) -> [String: MLXArray] {
        lmHead == nil ? weights.filter { $0.key != "lm_head.weight" } : weights
    }

    public var loraLayers: [Module] { model.layers }
}
