// swift-tools-version: 6.1
import PackageDescription

// Stand-ins for mlx-swift and mlx-swift-lm, so that MLXH2O builds and is tested without a Mac:
// modules of the same names with the same signatures, as far as MLXH2O uses them, and real
// arithmetic, by the mlx-c subset of c_api/mlx_c over the MLX wheel's CPU backend. And for what
// Apple's systems have: CryptoKit, and what Linux's Dispatch lacks. SwiftUI and swift-transformers'
// Tokenizers are declarations, by which the examples compile.
let package = Package(
    name: "Linux",
    products: [
        .library(name: "MLX", targets: ["MLX"]),
        .library(name: "MLXNN", targets: ["MLXNN"]),
        .library(name: "MLXLMCommon", targets: ["MLXLMCommon"]),
        .library(name: "MLXLLM", targets: ["MLXLLM"]),
        .library(name: "CryptoKit", targets: ["CryptoKit"]),
        .library(name: "DispatchMemoryPressure", targets: ["DispatchMemoryPressure"]),
        .library(name: "SwiftUI", targets: ["SwiftUI"]),
        .library(name: "Tokenizers", targets: ["Tokenizers"]),
    ],
    targets: [
        .systemLibrary(name: "Cmlx", pkgConfig: "mlxc"),
        .target(name: "MLX", dependencies: ["Cmlx"]),
        .target(name: "MLXNN", dependencies: ["MLX"]),
        .target(name: "MLXLMCommon", dependencies: ["MLX", "MLXNN"]),
        .target(name: "MLXLLM", dependencies: ["MLX", "MLXLMCommon", "MLXNN"]),
        .target(name: "CryptoKit"),
        .target(name: "DispatchMemoryPressure"),
        .target(name: "SwiftUI"),
        .target(name: "Tokenizers"),
        .testTarget(
            name: "LinuxTests",
            dependencies: [
                "MLX", "MLXNN", "MLXLMCommon", "MLXLLM", "CryptoKit", "DispatchMemoryPressure",
            ]),
    ]
)
