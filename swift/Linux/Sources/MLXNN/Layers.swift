import Foundation
import MLX

open class Linear: Module, UnaryLayer {
    public let weight: MLXArray
    public let bias: MLXArray?

    /// `[outputs, inputs]`.
    open var shape: (Int, Int) { (weight.dim(0), weight.dim(1)) }

    public init(_ inputDimensions: Int, _ outputDimensions: Int, bias: Bool = true) {
        let scale = sqrt(1 / Float(inputDimensions))
        weight = MLXRandom.uniform(-scale ..< scale, [outputDimensions, inputDimensions])
        self.bias = bias ? MLXRandom.uniform(-scale ..< scale, [outputDimensions]) : nil
    }

    public init(weight: MLXArray, bias: MLXArray? = nil) {
        self.weight = weight
        self.bias = bias
    }

    open func callAsFunction(_ x: MLXArray) -> MLXArray {
        bias.map { addMM($0, x, weight.T) } ?? matmul(x, weight.T)
    }
}

open class Embedding: Module, UnaryLayer {
    public let weight: MLXArray

    /// `[embeddings, dimensions]`.
    open var shape: (Int, Int) { (weight.dim(0), weight.dim(1)) }

    public init(embeddingCount: Int, dimensions: Int) {
        weight = MLXRandom.normal([embeddingCount, dimensions], scale: sqrt(1 / Float(dimensions)))
    }

    public init(weight: MLXArray) { self.weight = weight }

    open func callAsFunction(_ x: MLXArray) -> MLXArray { weight[x] }

    /// The logits of tied weights.
    open func asLinear(_ x: MLXArray) -> MLXArray { matmul(x, weight.T) }
}

open class RMSNorm: Module, UnaryLayer {
    public let weight: MLXArray
    public let eps: Float

    public init(dimensions: Int, eps: Float = 1e-5) {
        weight = MLXArray.ones([dimensions])
        self.eps = eps
    }

    open func callAsFunction(_ x: MLXArray) -> MLXArray {
        MLXFast.rmsNorm(x, weight: weight, eps: eps)
    }
}

public func silu(_ x: MLXArray) -> MLXArray { x * sigmoid(x) }

public func logSoftmax(_ x: MLXArray, axis: Int = -1) -> MLXArray {
    x - logSumExp(x, axis: axis, keepDims: true)
}
