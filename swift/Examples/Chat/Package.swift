// swift-tools-version: 6.1
import PackageDescription

// Needs a Mac: mlx-swift, and swift-transformers for tokenizers.
let package = Package(
    name: "Chat",
    platforms: [.macOS(.v14), .iOS(.v17), .tvOS(.v17), .visionOS(.v1)],
    products: [.library(name: "LocalTokenizers", targets: ["LocalTokenizers"])],
    dependencies: [
        .package(name: "mlx-h2o", path: "../../.."),
        .package(url: "https://github.com/ml-explore/mlx-swift-lm", "3.31.4" ..< "3.34.0"),
        .package(url: "https://github.com/huggingface/swift-transformers", from: "1.3.0"),
    ],
    targets: [
        .target(
            name: "LocalTokenizers",
            dependencies: [
                .product(name: "MLXLMCommon", package: "mlx-swift-lm"),
                .product(name: "Tokenizers", package: "swift-transformers"),
            ]),
        .executableTarget(
            name: "Chat",
            dependencies: [
                "LocalTokenizers", .product(name: "MLXH2O", package: "mlx-h2o"),
                .product(name: "MLXLLM", package: "mlx-swift-lm"),
            ]),
    ]
)
